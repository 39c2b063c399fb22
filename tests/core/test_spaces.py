"""Leaf tables of spaces: structure, JSON, hash, and what is refused."""

import json

import numpy as np
import pytest
from gymnasium import spaces as gs
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.core.types import EnvSpec, tree_map

SPACES = [
    gs.Box(-1, 1, (2, 3), np.float32),
    gs.Box(np.array([-np.inf, 0.1]), np.array([3.5, np.inf]), dtype=np.float64),
    gs.Box(0, 255, (4, 4), np.uint8),
    gs.Box(-5, 5, (), np.int16),
    gs.Discrete(7),
    gs.Discrete(3, start=-1),
    gs.MultiDiscrete([2, 3, 4]),
    gs.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    gs.MultiBinary(5),
    gs.MultiBinary([2, 2]),
    gs.Tuple((gs.Discrete(2), gs.Box(0, 1, (3,)))),
    gs.Dict({"b": gs.Discrete(2), "a": gs.Dict({"x": gs.MultiBinary(3), "y": gs.Tuple((gs.Discrete(3),))})}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_json_round_trip_gives_an_equal_space_and_hash(space):
    layout = Layout(space)
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again.space == space
    assert again == layout
    assert again.digest == layout.digest
    assert [(leaf.name, leaf.dtype, leaf.shape) for leaf in again.leaves] == [
        (leaf.name, leaf.dtype, leaf.shape) for leaf in layout.leaves
    ]


def test_different_spaces_have_different_hashes():
    assert len({Layout(space).digest for space in SPACES}) == len(SPACES)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_samples_survive_flattening_and_pass_the_check(space):
    layout = Layout(space)
    space.seed(0)
    for _ in range(10):
        sample = space.sample()
        assert layout.problem(sample) is None
        again = layout.unflatten(layout.flatten(sample))
        tree_map(np.testing.assert_array_equal, again, sample)


simple = st.sampled_from([gs.Discrete(4), gs.Box(-1, 1, (2,), np.float32), gs.MultiBinary(2), gs.MultiDiscrete([3, 2])])
nested = st.recursive(
    simple,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda subs: gs.Tuple(subs))
        | st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3).map(gs.Dict)
    ),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(nested, st.integers(0, 1000), st.integers(1, 4))
def test_batches_of_any_nesting_come_back_as_they_were(space, seed, n):
    layout = Layout(space)
    space.seed(seed)
    samples = [layout.flatten(space.sample()) for _ in range(n)]
    batch = layout.unflatten([np.stack(leaf) for leaf in zip(*samples, strict=True)])
    for leaf, array, row in zip(layout.leaves, layout.batch(batch, n), layout.flatten(batch), strict=True):
        assert array.dtype == leaf.dtype
        np.testing.assert_array_equal(array, row)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))).space == space


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (gs.Text(5), "token ids"),
        (gs.Sequence(gs.Discrete(2)), "pad"),
        (gs.OneOf([gs.Discrete(2), gs.Box(0, 1)]), "no fixed size.*a Discrete that selects"),
        (type("MissionSpace", (gs.Space,), {})(), "^MissionSpace spaces are not supported: use Box"),
        (gs.Dict({"mission": type("MissionSpace", (gs.Space,), {})()}), "'mission'.*leave it out.*FilterObservation"),
        (gs.Dict({"deep": gs.Tuple((gs.Graph(gs.Box(0, 1, (2,)), None),))}), "at 'deep.0'"),
    ],
)
def test_unsupported_spaces_are_refused_with_advice(space, words):
    with pytest.raises(UserError, match=words):
        Layout(space)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros(3, np.float32), "shape"),
        (np.array([0, 0], complex), "dtype"),
        (np.full(2, 5.0, np.float32), "outside"),
        ("text", "leaf"),
        (None, "leaf"),
    ],
)
def test_a_value_outside_its_space_is_named(value, words):
    assert words in Layout(gs.Box(-1, 1, (2,), np.float32)).problem(value)


def test_a_value_of_another_structure_is_named():
    layout = Layout(gs.Dict({"a": gs.Discrete(2)}))
    assert "structure" in layout.problem({"b": 0})
    assert "structure" in layout.problem(3)


def test_torch_actions_are_taken_as_they_are():
    import torch

    (leaf,) = Layout(gs.Discrete(3)).batch(torch.tensor([0, 1, 2]), 3)
    assert leaf.tolist() == [0, 1, 2]


def test_env_spec_round_trip():
    spec = EnvSpec(SPACES[-1], gs.Discrete(2), "x", 500)
    assert EnvSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
