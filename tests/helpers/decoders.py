"""Every decoder of the link, as a function of bytes that raises nothing but what would be a bug, and bytes it likes.

The fuzzers share them: test_fuzz.py (a million each in `make fuzz`), test_fuzz_hypothesis.py, and fuzz_atheris.py.
"""

import contextlib
import itertools
import json
import zlib
from functools import partial
from pathlib import Path

import gymnasium
import msgspec
import numpy as np

from corral.core import encoding
from corral.core.errors import EnvFailed, UserError
from corral.core.gym_env import build_env
from corral.core.spaces import Layout
from corral.envs.serve.server import SimulatorServer
from corral.envs.serve.slots import Slots
from corral.envs.serve.state_errors import BadRequest, pack_state, unpack_state
from corral.link import protocol as clp
from corral.link.address import parse_url
from corral.link.client.fleet import Fleet
from corral.link.client.session import Simulator as LinkSimulator
from corral.link.client.session import SimulatorSession
from corral.link.client.states import States as LinkStates
from corral.link.control import Budget, Hello, Knock, Ready, Stats, Welcome, from_meta, to_meta
from corral.link.layout import RowsLayout, layout_hash, read_space
from corral.link.message import BadMessage, Message, read_message, read_meta
from corral.link.protocol import Limits
from corral.link.transports.base import Binding, Event, Wire
from corral.link.transports.grpc import unpack
from corral.link.transports.json_client import JsonPeer
from corral.link.transports.json_values import Mistake, read_obs, read_said, spaces_of
from corral.link.transports.tcp import BadFrames, FrameReader, pack
from corral.snapshot.keepers.choose import find_keeper
from corral.snapshot.states import StatesFull
from corral.snapshot.store import client as sw
from corral.snapshot.store.base import MemoryStates, StateBudget
from corral.snapshot.store.client import RemoteStates
from corral.snapshot.store.server import StateServer
from helpers.declared_walk import Declared

VECTORS = [path.read_bytes() for path in sorted((Path(__file__).parents[2] / "sdk" / "vectors").glob("*.bin"))]
MAX = 1 << 20


class Strange(Wire):
    """A wire whose other side is the test."""

    def __init__(self, dialled=False):
        self.peer, self.dialled, self.sent, self.closed = "strange", dialled, 0, False
        self.last = None

    def send(self, frames):
        self.sent += 1
        self.last = [bytes(frame) for frame in frames]

    def close(self):
        self.closed = True


class Scripted(Binding):
    """Brings the events that the test has put there."""

    urls = ["test://"]  # noqa: RUF012

    def __init__(self):
        self.events = []

    def poll(self, timeout_s):
        events, self.events = self.events, []
        return events

    def close(self):
        pass


class Finite(Scripted):
    """The same one by one, for who would wait for more: there is no more."""

    def poll(self, timeout_s):
        if not self.events:
            raise EnvFailed("nothing more comes")
        return [self.events.pop(0)]


class Walk(Declared):
    """An environment whose states travel: its author checks nothing."""

    def _write(self, state):
        self._x, self._t = state["x"] + 0.0, state["t"] + 0
        self.np_random.bit_generator.state = state["rng"]


def packed(*messages):
    """Messages as bytes of `tcp://`."""
    return b"".join(bytes(part) for message in messages for part in pack(message.frames()))


def frames_in(data, chunk=1 << 16):
    """The messages in these bytes, which come in pieces of at most that size; BadFrames at the first that is none."""
    reader, at = FrameReader(MAX), 0
    while at < len(data):
        room = reader.room()
        size = min(len(room), len(data) - at, chunk)
        room[:size] = data[at : at + size]
        reader.took(size)
        at += size
        while (frames := reader.next()) is not None:
            yield [bytes(frame) for frame in frames]


def _frames(data):
    with contextlib.suppress(BadFrames, BadMessage):
        for frames in frames_in(data, 1 + len(data) % 97):
            read_message(frames)


def _grpc(data):
    with contextlib.suppress(BadFrames, BadMessage):
        read_message(unpack(data, MAX))


CONTROLS = (Knock, Hello, Welcome, Ready, Stats, sw.ClientKnock, sw.ServerWelcome, sw.Dropped, sw.Page, sw.Held)


def _meta(data):
    with contextlib.suppress(BadMessage):
        meta = read_meta(data)
        for kind in CONTROLS:
            with contextlib.suppress(BadMessage):
                from_meta(meta, kind)


def _space(data):
    with contextlib.suppress(BadMessage):
        layout = read_space(read_meta(data), "observation")
        layout_hash(layout, layout)


def _value(data):
    with contextlib.suppress(encoding.DecodeError):
        encoding.decode(data)


def _url(data):
    with contextlib.suppress(UserError):
        parse_url(data.decode(errors="replace"))


TWO = Layout(gymnasium.spaces.Discrete(2))


def _json(data):
    with contextlib.suppress(Mistake):
        said = read_said(data)
        observation, _ = spaces_of(said, None, TWO)
        assert all(np.isfinite(leaf).all() for leaf in read_obs(said.obs, observation))


class JsonLoop:
    """A client's lines, and a learner that answers each with the next request."""

    def __call__(self, data):
        """Lines are the client's messages."""
        peer = None
        for seq, line in enumerate(data.split(b"\n")[:8], 1):
            try:
                said = read_said(line)
                if peer is None:
                    peer = JsonPeer(b"id", said.env_id, "test", spaces_of(said, None, TWO), MAX)
                    peer.hello(said)
                    peer.send(Message(clp.Op.WELCOME, meta=to_meta(_WELCOME)).frames())
                else:
                    peer.take(said)
            except Mistake as mistake:
                if peer is not None:
                    peer.fail(str(mistake))
            if peer is None or peer.lost is not None:
                return
            op = clp.Op.RESET if seq == 1 else clp.Op.STEP
            peer.send(Message(op, 0, 0, seq, 5, 0, 1, 0, None, [bytes(4), bytes(8)]).frames())


_WELCOME = Welcome((1, 0), 5, False, bytes(16), b"", 4, Limits(message=MAX, batch=8), Budget(MAX, 10))


class ExportedState:
    """Bytes with the checksum of a state; one that is taken can be stepped from."""

    def __init__(self):
        factory = Walk
        env, spec = build_env(factory, "Walk")
        env.close()
        self._layout = layout_hash(spec.observation, spec.action)
        self._hosted = Slots(factory, "Walk", spec, 1, find_keeper(factory), Budget(MAX, 10))
        self._states = self._hosted.states
        self._hosted.reset(1, [bytes(4), bytes(8)])
        self._hosted.save(1, [bytes(4), (1).to_bytes(8, "little")])

    def good(self):
        """Bytes of a state, without what is put before them here."""
        return pack_state(self._layout, self._states.get(1))[12:]

    def __call__(self, body):
        """Import, and use it if it was taken."""
        head = b"CPY1" + self._layout.to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little")
        try:
            unpack_state(self._layout, self._states, 2, head + body)
        except (BadRequest, StatesFull):
            return
        two = (2).to_bytes(8, "little")
        self._hosted.load(1, [bytes(4), two], True)
        self._hosted.expand(1, [two, bytes(8), bytes(8)])


class Simulator:
    """A `corral serve` that strangers dial: bytes of `tcp://` to it, from the handshake on.

    A message that is no part of a handshake goes to a session that others before may have used. Session and layout are
    put right, and the numbers of requests, so that what follows their check is reached.
    """

    def __init__(self):
        self._binding = Scripted()
        self._server = SimulatorServer(Walk, "Walk", self._binding, 4)
        self._open = Strange()

    def __call__(self, data):
        """One connection of its own if it begins with a handshake."""
        server = self._server
        wire = None
        with contextlib.suppress(BadFrames):
            for frames in frames_in(data):
                if wire is None:
                    wire = self._wire(frames[0])
                if len(frames[0]) == clp.HEADER.size and frames[0][3] >= clp.Op.RESET and wire in server._by_wire:
                    frames[0] = self._put_right(bytearray(frames[0]), server._by_wire[wire])
                self._post(Event(wire, frames))
                if wire.closed:
                    break
        if wire is not None and wire is not self._open:
            self._end(wire)
        assert len(server._sessions) <= 1
        assert not server._greetings

    def _wire(self, head):
        if len(head) != clp.HEADER.size or head[3] < clp.Op.RESET:
            wire = Strange()
            self._post(Event(wire))
            return wire
        if self._open not in self._server._by_wire:
            self._end(self._open)
            self._open = Strange()
            self._greet(self._open)
        return self._open

    def _put_right(self, head, session):
        again = head[8] % 4 == 0  # some are asked twice
        head[8:16] = (session.done_until + 1 - again).to_bytes(8, "little")
        head[16:24] = session.number.to_bytes(4, "little") + self._server._layout.to_bytes(4, "little")
        return bytes(head)

    def _greet(self, wire):
        self._post(Event(wire))
        self._post(Event(wire, Message(clp.Op.KNOCK, meta=to_meta(Knock())).frames()))
        self._post(Event(wire, Message(clp.Op.WELCOME, meta=to_meta(_WELCOME)).frames()))
        for op, number in ((clp.Op.RESET, 0), (clp.Op.SAVE, 1)):
            payload = [bytes(4), number.to_bytes(8, "little")]
            message = Message(op, 0, 0, number + 1, 5, self._server._layout, 1, payload=payload)
            self._post(Event(wire, message.frames()))

    def _end(self, wire):
        self._post(Event(wire, lost="gone"))
        for session in [session for session in self._server._sessions if session.wire is None]:
            self._server._end(session)

    def _post(self, event):
        self._binding.events = [event]
        self._server.poll(0)


class Planner:
    """What a simulator answers to requests that name states; numbers that must fit are put right."""

    def __init__(self):
        self._binding = Finite()
        self._fleet = Fleet(self._binding)
        env, spec = build_env(Walk, "Walk")
        env.close()
        hello = Hello(
            [(1, 0)], "test", "Walk", 0, bytes(16), bytes(16), 0, spec.observation.to_json(), spec.action.to_json(),
            1, 4, 1, 4, True, ["raw_reward"],
        )  # fmt: skip
        self._simulator = LinkSimulator(hello, spec)

    def __call__(self, data):
        """The first of these messages answers one kind of request, whichever the bytes stand for."""
        try:
            answer = next(frames_in(data), None)
        except BadFrames:
            return
        if answer is None:
            return
        if not self._fleet.sessions:
            self._join()
        (session,) = self._fleet.sessions.values()
        self._binding.events, session.wire.answers = [], partial(self._answer, answer)
        name, arguments = _ASKED[zlib.crc32(data) % len(_ASKED)]
        with contextlib.suppress(EnvFailed):
            getattr(LinkStates(self._fleet, session), name)(*arguments)

    def _answer(self, frames, request):
        head = frames[0]
        if len(head) == clp.HEADER.size:  # of op, flags and status only these: good replies have the right op
            head = head[:3] + request[3:4] + head[4:8] + request[8:24] + head[24:]
        self._binding.events.append(Event(next(iter(self._fleet.sessions.values())).wire, [head, *frames[1:]]))

    def _join(self):
        session = SimulatorSession(1, self._simulator, Answered(), Limits(), 16)
        self._fleet.sessions[1] = self._fleet._by_wire[session.wire] = session


class Answered(Strange):
    """A wire that has an answer to each request."""

    answers = None

    def send(self, frames):
        if self.answers is not None and not int.from_bytes(frames[0][4:6], "little") & clp.NO_REPLY:
            self.answers(bytes(frames[0]))


_ONE = np.array([1])
_ASKED = [
    ("save", (_ONE,)), ("load", (_ONE, _ONE)), ("expand", (_ONE, _ONE)), ("rollout", (_ONE, np.array([1, 1]), 2)),
    ("export", (_ONE,)), ("take_in", ([b"state"],)), ("stats", ()),
]  # fmt: skip


class StateServing:
    """A `corral state-server`: bytes of `tcp://` to it. What does not begin with KNOCK comes after a handshake."""

    def __init__(self):
        self._binding = Scripted()
        self._server = StateServer(self._binding, MemoryStates(StateBudget(MAX, 100)))

    def __call__(self, data):
        """One client, which is lost at the end."""
        wire, first = Strange(), True
        self._post(Event(wire))
        with contextlib.suppress(BadFrames):
            for frames in frames_in(data):
                if first and len(frames[0]) == clp.HEADER.size and frames[0][3] != clp.Op.KNOCK:
                    self._post(Event(wire, Message(clp.Op.KNOCK, meta=to_meta(sw.knock(bytes(16)))).frames()))
                    self._post(Event(wire, Message(clp.Op.READY, meta=to_meta(Ready(b""))).frames()))
                first = False
                self._post(Event(wire, frames))
                if wire.closed:
                    break
        self._post(Event(wire, lost="gone"))
        assert not self._server._clients

    def _post(self, event):
        self._binding.events = [event]
        self._server.poll(0)


class StateClient:
    """What a state server answers, to a client that asks for all there is; the number of the request is put right."""

    def __init__(self):
        self._client = RemoteStates("tcp://127.0.0.1:1")
        self._client._binding.close()
        self._client._binding = self._server = Finite()

    def __call__(self, data):
        """Each request gets these answers."""
        client, server = self._client, self._server
        try:
            answers = list(frames_in(data))
        except BadFrames:
            return
        for ask in (partial(client.get, "a"), partial(client.drop, "a"), client.names, lambda: client.nbytes):
            wire = client._wire = Strange()
            client._ready = True
            server.events = []
            for number, frames in enumerate(answers[:3]):
                if len(frames[0]) == clp.HEADER.size:
                    seq = (client._seq + 1 + number).to_bytes(8, "little")
                    frames = [frames[0][:8] + seq + frames[0][16:], *frames[1:]]
                server.events.append(Event(wire, frames))
            with contextlib.suppress(EnvFailed, UserError, StatesFull):
                ask()


def _good_metas():
    return [frames[1] for data in VECTORS for frames in frames_in(data) if read_message(frames).meta is not None]


def _good_spaces():
    hellos = [meta for meta in map(read_meta, _good_metas()) if "observation" in meta]
    more = [
        gymnasium.spaces.MultiBinary([2, 2]),
        gymnasium.spaces.MultiDiscrete([2, 3]),
        gymnasium.spaces.Tuple(
            (gymnasium.spaces.Discrete(3, start=-1), gymnasium.spaces.Box(0, 255, (4, 4), np.uint8))
        ),
    ]
    found = [hello[key] for hello in hellos for key in ("observation", "action")]
    return [msgspec.msgpack.encode(space) for space in found + [Layout(space).to_json() for space in more]]


def _good_values():
    values = [
        {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [1, None, True, 2.5, "text", b"bytes"]},
        {"state": 2**100, "rng": {"inc": -(2**70)}, "none": np.zeros((0, 3))},
        [np.array(3, np.uint8), np.array([True, False])],
    ]
    return [b"".join(bytes(part) for part in encoding.encode(value)) for value in values]


def _good_json():
    reset = {"command": "reset", "env_id": "a", "obs": [0.5, 1.0], "seeded": True}
    spaces = {"action_space": 3, "observation_space": Layout(gymnasium.spaces.Box(-1, 1, (2,))).to_json()}
    step = {"command": "step", "env_id": "a", "obs": [1, 2], "reward": 1, "terminated": False, "truncated": False}
    nested = {"command": "reset", "env_id": 7, "obs": {"b": [[1, 2], [3, 4]], "a": 0.5}, "instance": "0" * 32}
    end = {**step, "terminated": True, "raw_reward": 2.5, "life_lost": True}
    all_of_them = reset, {**reset, **spaces}, step, nested, end, {"command": "terminate", "env_id": "a"}
    return [json.dumps(said).encode() for said in all_of_them]


def _good_loops():
    reset, described, step, nested, end, terminate = _good_json()
    return [b"\n".join(lines) for lines in (
        [reset, step, step], [described, described, step, end, reset], [reset, step, reset], [nested, nested],
        [reset, step, terminate], [reset, end, reset, step],
    )]  # fmt: skip


def _good_requests():
    op, u8 = clp.Op, partial(int.to_bytes, length=8, byteorder="little")
    slot, one, two = bytes(4), u8(1), u8(2)
    state = ExportedState()
    blob = pack_state(state._layout, state._states.get(1))
    requests = [
        (op.STEP, [slot, bytes(8)]), (op.LOAD, [slot, one]), (op.EXPAND, [one, bytes(8), two]),
        (op.EXPAND, [one, bytes(8), two, u8(3)]), (op.EXPORT, [one]), (op.STATS, []), (op.DROP, [one]),
        (op.HEARTBEAT, []), (op.IMPORT, [two, u8(len(blob)), blob]), (op.RESET, [slot, one]), (op.SAVE, [slot, one]),
    ]  # fmt: skip
    messages = [
        Message(op, clp.AUTORESET, 0, 10 + k, 5, 0, 1, 0, None, payload) for k, (op, payload) in enumerate(requests)
    ]
    messages.append(Message(op.ROLLOUT, 0, 0, 30, 5, 0, 1, 0, {"steps": 2}, [one, bytes(16)]))
    greeting = [Message(op.KNOCK, meta=to_meta(Knock())), Message(op.WELCOME, meta=to_meta(_WELCOME))]
    pairs = [packed(a, b) for a, b in itertools.pairwise(messages)]
    return [*map(packed, messages), packed(*greeting), packed(*greeting, *messages[-3:]), *pairs, *VECTORS]


def _good_answers():
    """Rows of one, with what else each kind of answer has."""
    rows, table = RowsLayout(raw_reward=True).group().make(1)
    faulty, table = RowsLayout(raw_reward=True).group().make(1)
    table[2][:], table[3][:] = clp.FAULTY | clp.TRUNCATED, clp.Status.E_ENV
    obs, five = bytes(16), (5).to_bytes(8, "little")
    words = {"rows": {"0": "it broke"}}
    answers = [
        ([rows], None), ([rows, obs], None), ([faulty, obs], words), ([bytes(16), bytes(4), rows, obs], None),
        ([rows, five, b"state"], None), ([], {"slots": 4, "steps": 1}),
    ]  # fmt: skip
    return [packed(Message(clp.Op.SAVE, clp.REPLY, batch=1, meta=meta, payload=payload)) for payload, meta in answers]


def _good_state_requests():
    def ask(op, meta, *payload):
        return Message(op, seq=1, meta=meta, payload=list(payload))

    op = clp.Op
    asked = [
        ask(op.PUT, {"name": "a"}, b"state"), ask(op.GET, {"name": "a"}), ask(op.DROP_STATE, {"name": "a"}),
        ask(op.LIST, {"prefix": "a", "after": ""}), ask(op.STATS, {}), ask(op.CLOSE, {"reason": ""}),
    ]  # fmt: skip
    greeting = [Message(op.KNOCK, meta=to_meta(sw.knock(bytes(16)))), Message(op.READY, meta=to_meta(Ready(b"")))]
    return [packed(*greeting), *map(packed, asked), packed(*asked), packed(*greeting, *asked)]


def _good_state_answers():
    def answer(op, meta=None, *payload, flags=clp.REPLY, status=0):
        return packed(Message(op, flags, status, meta=meta, payload=list(payload)))

    op = clp.Op
    return [
        answer(op.GET, None, b"state"), answer(op.GET, None, b"", status=clp.Status.E_UNKNOWN_STATE),
        answer(op.DROP_STATE, {"dropped": True}), answer(op.LIST, {"names": ["a", "b"], "more": False}),
        answer(op.LIST, {"names": ["a"], "more": True}) + answer(op.LIST, {"names": ["b"], "more": True}),
        answer(op.STATS, {"snapshots": 1, "snapshot_bytes": 5}),
        answer(op.PUT, {"text": "full"}, flags=clp.REPLY | clp.FAILED, status=clp.Status.E_SNAPSHOT_FULL),
        answer(op.ERROR, {"text": "no"}, flags=clp.NO_REPLY, status=clp.Status.E_AUTH),
    ]  # fmt: skip


# name: what makes the decoder, and bytes that it likes.
DECODERS = {
    "frames": (lambda: _frames, lambda: VECTORS),
    "grpc": (lambda: _grpc, lambda: VECTORS),
    "meta": (lambda: _meta, _good_metas),
    "space": (lambda: _space, _good_spaces),
    "value": (lambda: _value, _good_values),
    "exported": (ExportedState, lambda: [ExportedState().good()]),
    "url": (lambda: _url, lambda: [b"tcp://127.0.0.1:5555", b"zmq+json://[::1]:0/", b"grpc://*:80", b"zmq://a.b-c:1"]),
    "json": (lambda: _json, _good_json),
    "json_loop": (JsonLoop, _good_loops),
    "simulator": (Simulator, _good_requests),
    "planner": (Planner, _good_answers),
    "state_server": (StateServing, _good_state_requests),
    "state_client": (StateClient, _good_state_answers),
}
