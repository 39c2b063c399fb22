"""Spaces and values of JSON clients."""

import contextlib
import json
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces
from helpers.json_clients import (
    STEP,
    TWO,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.link.transports.json_values import (
    ClientError,
    described,
    inferred,
    read_client_message,
    read_obs,
    spaces_of,
)


def test_spaces_are_inferred_as_float32_of_the_shapes_that_come():
    box = partial(spaces.Box, -np.inf, np.inf, dtype=np.float32)
    assert inferred([1, 2, 3]).space == box((3,))
    assert inferred(1.5).space == box(())
    nested = inferred({"b": [[1, 2]], "a": {"x": True}})
    assert nested == inferred({"a": {"x": 0}, "b": [[0.5, 0.25]]})  # whatever the order
    assert nested == Layout(spaces.Dict([("a", spaces.Dict({"x": box(())})), ("b", box((1, 2)))]))


def test_spaces_are_described_in_several_ways():
    assert (
        described(2, "action") == described(spaces.Discrete(2), "action") == described(TWO.to_json(), "action") == TWO
    )
    for odd in (True, 0, "x", None, [2], {"type": "box"}):
        with pytest.raises(UserError, match=r"action=.*Gymnasium space"):
            described(odd, "action")


def test_observations_keep_to_their_spaces():
    layout = Layout(spaces.Dict({"n": spaces.Discrete(3), "u": spaces.Box(0, 255, (2,), np.uint8)}))
    assert [leaf.tolist() for leaf in read_obs({"n": 2.0, "u": [0, 255]}, layout)] == [[2], [[0, 255]]]
    for odd in ({"n": 3, "u": [0, 1]}, {"n": 0, "u": [0, 256]}, {"n": 0.5, "u": [0, 1]}, {"n": 0}, [0, [0, 1]], 7):
        with pytest.raises(ClientError):
            read_obs(odd, layout)


_NUMBERS = st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=3)


_VALUES = st.recursive(
    _NUMBERS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=2), v, max_size=3)
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([*STEP, "action_space", "observation_space", "seeded"]), _VALUES), _VALUES)
def test_any_client_message_is_read_or_refused(more, space):
    body = json.dumps({**STEP, "obs": [1], "action_space": {"type": "box", "shape": space}, **more}).encode()
    with contextlib.suppress(ClientError):
        said = read_client_message(body)
        observation, _ = spaces_of(said, None, None)
        assert all(np.isfinite(leaf).all() for leaf in read_obs(said.obs, observation))
