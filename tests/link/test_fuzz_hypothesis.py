"""What is encoded is decoded as it was, and what nobody encoded is refused: properties of every codec of the link.

Hypothesis chooses the same few examples each time; with CORRAL_FUZZ, as in `make fuzz`, many more, and others.
"""

import itertools
import json
import logging
import os
from dataclasses import replace
from functools import cache, partial

import msgspec
import numpy as np
import pytest
from gymnasium import spaces as gs
from helpers.decoders import DECODERS
from helpers.decoders.plain import CONTROLS
from helpers.decoders.wires import Scripted, Strange, Walk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from corral.core import encoding
from corral.core.gym_env import build_env
from corral.core.spaces import Layout
from corral.envs.serve.state_errors import pack_state, unpack_state
from corral.link import protocol as clp
from corral.link.control import Budget, Hello, Knock, Ready, Welcome, from_meta, to_meta
from corral.link.layout import layout_hash, read_space, space_group
from corral.link.message import Message, read_message, read_meta
from corral.link.protocol import Limits
from corral.link.transports.base import Event
from corral.link.transports.framing import FrameReader, pack, unpack
from corral.link.transports.json_values import action_value, read_client_message, read_obs
from corral.snapshot.env_states import EnvStates
from corral.snapshot.keepers.choose import find_keeper, make_scratch
from corral.snapshot.live_env import WatchedEnv
from corral.snapshot.store import client as sw
from corral.snapshot.store.base import MemoryStates
from corral.snapshot.store.client import RemoteStates
from corral.snapshot.store.server import StateServer

COUNT = int(os.environ.get("CORRAL_FUZZ", "0"))
FEW = settings(
    max_examples=max(40, COUNT // 100), deadline=None, derandomize=not COUNT, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    for name in ("link", "simulators", "states"):
        monkeypatch.setattr(logging.getLogger(f"corral.{name}"), "disabled", True)


def nested(scalars, keys):
    """Lists and dicts of these, a few deep."""
    values = scalars
    for _ in range(3):
        values = scalars | st.lists(values, max_size=4) | st.dictionaries(keys, values, max_size=4)
    return values


def unsigned(bits):
    return st.integers(0, 2**bits - 1)


floats = st.floats(allow_nan=False)
texts = st.text(max_size=20)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | floats | texts | st.binary(max_size=20)
metas = st.dictionaries(texts, nested(scalars, texts), max_size=4)
payloads = st.lists(st.binary(max_size=200), max_size=clp.MAX_FRAMES - 2)
messages = st.builds(
    Message, st.sampled_from([int(op) for op in clp.Op]), unsigned(6).map(lambda flags: flags & ~clp.META),
    unsigned(16), unsigned(64), unsigned(32), unsigned(32), unsigned(32), unsigned(32), st.none() | metas, payloads,
)  # fmt: skip


@FEW
@given(messages)
def test_messages_come_back_as_they_were(message):
    flags = message.flags | (clp.META if message.meta is not None else 0)
    assert read_message(message.frames()) == replace(message, flags=flags)


def cut(data, places):
    """Pieces of the bytes."""
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


# Some frames are so large that they are read into memory of their own.
frame_lists = st.lists(
    st.lists(st.binary(max_size=100) | st.integers(0, 400_000).map(bytes), min_size=1, max_size=8), max_size=4
)


@FEW
@given(frame_lists, st.lists(st.integers(0, 2**22), max_size=30))
def test_a_stream_cut_anywhere_gives_the_same_messages(sent, places):
    stream = b"".join(bytes(part) for frames in sent for part in pack(frames))
    reader, came = FrameReader(1 << 23), []
    for piece in cut(stream, places):
        while piece:
            room = reader.room()
            size = min(len(room), len(piece))
            room[:size] = piece[:size]
            reader.took(size)
            piece = piece[size:]
            while (frames := reader.next()) is not None:
                came.append([bytes(frame) for frame in frames])
    assert came == sent


@FEW
@given(frame_lists)
def test_a_message_of_grpc_is_its_frames(sent):
    for frames in sent:
        data = b"".join(bytes(part) for part in pack(frames))
        assert [bytes(frame) for frame in unpack(data, 1 << 23)] == frames


nonces, versions = st.binary(min_size=16, max_size=16), st.tuples(unsigned(8), unsigned(8))
counts = st.integers(0, 2**62)
controls = {
    Knock: st.builds(Knock, st.lists(versions), texts, unsigned(32)),
    Hello: st.builds(
        Hello, st.lists(versions), texts, texts, st.integers(-(2**31), 2**31), nonces, nonces, unsigned(32), metas,
        metas, st.integers(1, 64), st.integers(1, 2**40), st.integers(1, 2**40), st.integers(0, 4), st.booleans(),
        st.lists(texts),
    ),
    Welcome: st.builds(
        Welcome, versions, st.integers(1, 2**32 - 1), st.booleans(), nonces, st.binary(), st.integers(1, 1024),
        st.builds(Limits, *(st.integers(least, 2**40) for least in (4096, 1, 1, 256, 0))),
        st.builds(Budget, counts, counts),
    ),
    Ready: st.builds(Ready, st.binary()),
    sw.ClientKnock: st.builds(sw.ClientKnock, st.lists(versions), texts, nonces),
    sw.ServerWelcome: st.builds(sw.ServerWelcome, versions, nonces, st.binary(), counts),
    sw.Dropped: st.builds(sw.Dropped, st.booleans()),
    sw.Page: st.builds(sw.Page, st.lists(texts), st.booleans()),
    sw.Held: st.builds(sw.Held, counts, counts),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTROLS)
def test_control_messages_come_back_as_they_were(kind):
    @FEW
    @given(controls[kind])
    def come_back(control):
        assert from_meta(read_meta(msgspec.msgpack.encode(to_meta(control))), kind) == control

    come_back()


shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
leaves = st.one_of(
    st.builds(gs.Box, st.just(-1e3), st.just(1e3), shapes, st.sampled_from([np.float16, np.float32, np.float64])),
    st.builds(
        gs.Box, st.just(0), st.integers(1, 100), shapes, st.sampled_from([np.uint8, np.int16, np.int64, np.uint64])
    ),
    st.builds(gs.Discrete, st.integers(1, 2**40), start=st.integers(-(2**40), 2**40)),
    st.lists(st.integers(1, 50), min_size=1, max_size=4).map(gs.MultiDiscrete),
    st.integers(1, 9).map(gs.MultiBinary) | st.lists(st.integers(1, 4), min_size=1, max_size=3).map(gs.MultiBinary),
)
spaces = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(gs.Tuple)
        | st.lists(st.tuples(texts.filter(bool), inner), min_size=1, max_size=3, unique_by=lambda pair: pair[0]).map(
            gs.Dict
        )
    ),
    max_leaves=6,
)


def samples(space, seed, count):
    """Leaves of so many members of the space."""
    layout = Layout(space)
    space.seed(seed)
    rows = [layout.flatten(space.sample()) for _ in range(count)]
    columns = zip(layout.leaves, zip(*rows, strict=True), strict=True)
    return [np.stack([np.asarray(value, leaf.dtype) for value in column]) for leaf, column in columns]


@FEW
@given(spaces, st.integers(0, 1000), st.integers(1, 5))
def test_spaces_and_their_rows_come_back_as_they_were(space, seed, batch):
    layout = Layout(space)
    again = read_space(read_meta(msgspec.msgpack.encode(layout.to_json())), "observation")
    assert again == layout
    assert layout_hash(again, again) == layout_hash(layout, layout)
    values = samples(space, seed, batch)
    frame = space_group(layout).write(values, batch)
    for value, back in zip(values, space_group(again).read(frame, batch), strict=True):
        np.testing.assert_array_equal(value, back, strict=True)


@FEW
@given(spaces, st.integers(0, 1000))
def test_json_observations_and_actions_round_trip(space, seed):
    layout = Layout(space)
    row = samples(space, seed, 1)
    plain = action_value(row, layout)
    said = read_client_message(json.dumps({"command": "reset", "env_id": 1, "obs": plain}).encode())
    for value, back in zip(row, read_obs(said.obs, layout), strict=True):
        np.testing.assert_array_equal(value, back, strict=True)


arrays = hnp.arrays(
    hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.array_shapes(min_dims=0, min_side=0),
)
values = nested(scalars | arrays | st.integers(-(2**200), 2**200), texts)


def assert_same(value, back):
    if isinstance(value, np.ndarray):
        np.testing.assert_array_equal(value, back, strict=True)
    elif isinstance(value, dict):
        assert list(value) == list(back)
        assert_same(list(value.values()), list(back.values()))
    elif isinstance(value, list):
        assert len(value) == len(back)
        for one, other in zip(value, back, strict=True):
            assert_same(one, other)
    else:
        assert (type(value), value) == (type(back), back)


@FEW
@given(values)
def test_values_come_back_as_they_were(value):
    assert_same(value, encoding.decode(b"".join(bytes(part) for part in encoding.encode(value))))


class Passing(Strange):
    """A wire whose messages become events of the other side's binding."""

    def __init__(self, binding):
        super().__init__()
        self._binding, self.other = binding, None

    def send(self, frames):
        self._binding.events.append(Event(self.other, [bytes(frame) for frame in frames]))


class Within(Scripted):
    """A client's binding to a server in the same process."""

    def __init__(self):
        self._theirs = Scripted()
        self.server = StateServer(self._theirs, MemoryStates())
        here, there = Passing(self._theirs), Passing(self)
        here.other, there.other = there, here
        self.events = [Event(here)]

    def poll(self, timeout_s):
        self.server.poll(0)
        return super().poll(timeout_s)


names = st.sampled_from(["a", "b", "ab", "ä/1"]) | st.text("abcä/.-_ 1", min_size=1, max_size=5)
calls = st.lists(
    st.tuples(st.just("put"), names, st.binary(max_size=100))
    | st.tuples(st.sampled_from(["get", "drop", "names", "nbytes"]), names),
    max_size=10,
)


@FEW
@given(calls)
def test_a_state_server_is_a_dict_to_its_clients(calls):
    client, kept = RemoteStates("tcp://127.0.0.1:1"), {}
    client._binding.close()
    client._binding = Within()
    for call, name, *state in calls:
        if call == "put":
            client.put(name, *state)
            kept[name] = state[0]
        elif call == "get":
            assert client.get(name) == kept.get(name)
        elif call == "drop":
            assert client.drop(name) == (kept.pop(name, None) is not None)
        elif call == "names":
            assert client.names(name) == sorted(key for key in kept if key.startswith(name))
        else:
            assert client.nbytes == sum(map(len, kept.values()))


@FEW
@given(st.integers(0, 2**31), st.lists(st.integers(0, 2), max_size=15))
def test_exported_states_come_back_as_they_were(seed, actions):
    env, spec = build_env(Walk, "Walk")
    live = WatchedEnv(env, spec.observation)
    env.reset(seed=seed)
    for action in actions:
        env.step(action)
    layout = layout_hash(spec.observation, spec.action)
    states = EnvStates(spec, [live], [partial(make_scratch, Walk)], keeper=find_keeper(Walk))
    states.save_env(1, 0)
    unpack_state(layout, states, 2, pack_state(layout, states.get(1)))
    one, two = states.get(1), states.get(2)
    assert (one.kept, one.over) == (two.kept, two.over)
    np.testing.assert_array_equal(one.obs, two.obs, strict=True)


@cache
def good_inputs(name):
    return DECODERS[name][1]()


@st.composite
def mutations(draw, name):
    """Bytes that a decoder likes, cut and patched."""
    data = bytearray(draw(st.sampled_from(good_inputs(name))))
    patches = st.tuples(st.integers(0, len(data)), st.integers(0, 9), st.binary(max_size=9))
    for place, gone, put in draw(st.lists(patches, min_size=1, max_size=5)):
        data[place : place + gone] = put
    return bytes(data)


@pytest.mark.parametrize("name", DECODERS)
def test_anything_is_decoded_or_refused(name):
    decode = DECODERS[name][0]()

    @FEW
    @given(st.binary(max_size=300) | mutations(name))
    def is_decoded_or_refused(data):
        decode(data)

    is_decoded_or_refused()
