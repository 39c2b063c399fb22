"""Decoders of a simulator and of a learner that plans in one: handshakes, requests, replies, exported states."""

import contextlib
import itertools
import zlib
from functools import partial

import numpy as np

from corral.core.errors import EnvFailed
from corral.core.gym_env import build_env
from corral.envs.serve.server import SimulatorServer
from corral.envs.serve.slots import Slots
from corral.envs.serve.state_errors import BadRequest, pack_state, unpack_state
from corral.link import protocol as clp
from corral.link.client.fleet import Fleet
from corral.link.client.session import Simulator as LinkSimulator
from corral.link.client.session import SimulatorSession
from corral.link.client.states import StateClient
from corral.link.control import Budget, Hello, Knock, to_meta
from corral.link.layout import RowsLayout, layout_hash
from corral.link.message import Message
from corral.link.protocol import Limits
from corral.link.transports.base import Event
from corral.link.transports.framing import BadFrames
from corral.snapshot.keepers.choose import find_keeper
from corral.snapshot.states import StatesFull
from helpers.decoders.wires import MAX, VECTORS, WELCOME, Finite, Scripted, Strange, Walk, frames_in, packed
from helpers.state_rollout import rollout


class ExportedState:
    """Bytes with the checksum of a state; one that is taken can be stepped from."""

    def __init__(self):
        factory = Walk
        env, spec = build_env(factory, "Walk")
        env.close()
        self._layout = layout_hash(spec.observation, spec.action)
        self._slots = Slots(factory, "Walk", spec, 1, find_keeper(factory), Budget(MAX, 10))
        self._states = self._slots.states
        self._slots.reset(1, [bytes(4), bytes(8)])
        self._slots.save(1, [bytes(4), (1).to_bytes(8, "little")])

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
        self._slots.load(1, [bytes(4), two], True)
        self._slots.expand(1, [two, bytes(8), bytes(8)])


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
        self._post(Event(wire, Message(clp.Op.WELCOME, meta=to_meta(WELCOME)).frames()))
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


class Answered(Strange):
    """A wire that has an answer to each request."""

    answers = None

    def send(self, frames):
        if self.answers is not None and not int.from_bytes(frames[0][4:6], "little") & clp.NO_REPLY:
            self.answers(bytes(frames[0]))


_ONE = np.array([1])


_ASKED = [
    (StateClient.save, (_ONE,)), (StateClient.load, (_ONE, _ONE)), (StateClient.expand, (_ONE, _ONE)),
    (rollout, (_ONE, np.array([1, 1]), 2)), (StateClient.export, (_ONE,)), (StateClient.import_states, ([b"state"],)),
    (StateClient.stats, ()),
]  # fmt: skip


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
        request, arguments = _ASKED[zlib.crc32(data) % len(_ASKED)]
        with contextlib.suppress(EnvFailed):
            request(StateClient(self._fleet, session), *arguments)

    def _answer(self, frames, request):
        head = frames[0]
        if len(head) == clp.HEADER.size:  # of op, flags and status only these: good replies have the right op
            head = head[:3] + request[3:4] + head[4:8] + request[8:24] + head[24:]
        self._binding.events.append(Event(next(iter(self._fleet.sessions.values())).wire, [head, *frames[1:]]))

    def _join(self):
        session = SimulatorSession(1, self._simulator, Answered(), Limits(), 16)
        self._fleet.sessions[1] = self._fleet._by_wire[session.wire] = session


def good_requests():
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
    greeting = [Message(op.KNOCK, meta=to_meta(Knock())), Message(op.WELCOME, meta=to_meta(WELCOME))]
    pairs = [packed(a, b) for a, b in itertools.pairwise(messages)]
    return [*map(packed, messages), packed(*greeting), packed(*greeting, *messages[-3:]), *pairs, *VECTORS]


def good_answers():
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
