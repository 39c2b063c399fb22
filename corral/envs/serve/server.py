"""A Python simulator's network side: answers learners' requests, keeps sessions through lost connections."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from corral.core.encoding import Buffer
from corral.core.errors import RunFailed, UserError
from corral.core.gym_env import EnvFactory, build_env, claim, release
from corral.core.log import RateLimitedLog
from corral.core.machine import resident_bytes
from corral.envs.serve.slots import SlotReply, Slots, max_slots
from corral.envs.serve.state_errors import BadRequest
from corral.envs.serve.supervisor import RequestClock
from corral.link import protocol as clp
from corral.link.auth import LEARNER, SIMULATOR, is_proven, new_nonce, prove
from corral.link.control import OURS, Hello, Knock, Ready, Welcome, from_meta, to_meta
from corral.link.greetings import Greeting, Greetings
from corral.link.layout import layout_hash
from corral.link.message import BadMessage, Message, read_message
from corral.link.transports.base import Binding, Event, Wire
from corral.snapshot.keepers.choose import find_keeper

log = logging.getLogger("corral.envs")

_POLL_S = 0.25
_KEEP_S = 30.0  # for a session without a connection
_HANDSHAKE_S = 60.0  # a learner may be busy with an update
_MAX_SESSIONS, _MAX_GREETINGS = 64, 64
_PLAIN: dict[int, Callable[[Slots, int, Sequence[Buffer]], SlotReply]] = {
    clp.Op.RESET: Slots.reset, clp.Op.SAVE: Slots.save, clp.Op.EXPAND: Slots.expand, clp.Op.EXPORT: Slots.export,
    clp.Op.IMPORT: Slots.import_states,
}  # fmt: skip
"""Requests without options."""


@dataclass(eq=False)
class _Session:
    """A learner's environments, settings and last replies."""

    number: int
    slots: Slots
    welcome: Welcome
    wire: Wire | None
    detached_at: float = 0.0
    replies: OrderedDict[int, list[Buffer]] = field(default_factory=OrderedDict)
    done_until: int = 0  # highest completed request; requests are processed in order


@dataclass
class _LearnerGreeting(Greeting):
    nonce: bytes = field(default_factory=new_nonce)
    resumes: _Session | None = None


class SimulatorServer:
    """Serves one kind of environment to learners that connect to it, or to the one that it connects to."""

    def __init__(
        self,
        factory: EnvFactory,
        name: str,
        binding: Binding,
        slots: int,
        token: bytes | None = None,
        *,
        clock: RequestClock | None = None,
        instance: bytes = b"",
    ):
        self._clock = clock or RequestClock()
        self._factory, self._name, self._binding, self._token = factory, name, binding, token
        env, self._spec = build_env(factory, name)
        env.close()
        self._num_slots = max_slots(self._spec, slots)
        if slots > 1:
            claim(env, self)  # `find_keeper` builds a second one, which must be another object
        self._keeper = find_keeper(factory)
        release(env)
        self._layout = layout_hash(self._spec.observation, self._spec.action)
        self._instance = instance or new_nonce()
        self._sessions: list[_Session] = []  # learners choose their numbers, so two may have the same
        self._by_wire: dict[Wire, _Session] = {}
        self._greetings: Greetings[_LearnerGreeting] = Greetings(_MAX_GREETINGS, _HANDSHAKE_S)
        self._over = False
        self._peer_log = RateLimitedLog(log)
        self.last_learner = time.monotonic()

    def run(self, wait_s: float = 0.0, is_gone: Callable[[], bool] | None = None) -> None:
        """Serve until the learner that this side connected to ends the run; RunFailed after `wait_s` without one.

        Without a learner, `is_gone()` decides whether to stop waiting.
        """
        while not self._over:
            self.poll(_POLL_S)
            if self._sessions:
                self.last_learner = time.monotonic()
            elif is_gone is not None and not self._greetings and is_gone():
                break
            waited = time.monotonic() - self.last_learner
            if wait_s and waited > wait_s:
                raise RunFailed(
                    f"No learner at {', '.join(self._binding.urls)} for {waited:.0f} s: check that it is running "
                    "and reachable."
                )

    def poll(self, timeout_s: float) -> None:
        self._clock.wait()
        for event in self._binding.poll(timeout_s):
            session = self._by_wire.get(event.wire)
            try:
                if session is not None:
                    self._take(session, event)
                else:
                    self._greet(event)
            except BadMessage as error:
                self._refuse(event.wire, clp.Status.E_PROTOCOL, f"the learner sent {error}")
        now = time.monotonic()
        for session in list(self._sessions):
            if session.wire is None and now - session.detached_at > _KEEP_S:
                log.info("a learner did not reconnect within %g s; its environments are closed.", _KEEP_S)
                self._end(session)
        for wire, limit in self._greetings.overdue():
            self._refuse(wire, clp.Status.E_PROTOCOL, f"no handshake within {limit:g} s")

    def close(self) -> None:
        why = {"reason": "the simulator is shutting down"}
        for session in list(self._sessions):
            if session.wire is not None:
                goodbye = Message(clp.Op.CLOSE, clp.NO_REPLY, 0, 0, session.number, self._layout, meta=why)
                session.wire.send(goodbye.frames())
            self._end(session)
        self._binding.close()

    def _greet(self, event: Event) -> None:
        wire = event.wire
        if event.lost is not None:
            self._greetings.pop(wire)
        elif event.frames is None:
            if self._greetings.add(wire, _LearnerGreeting()) and wire.initiated:
                self._hello(wire)
        elif wire in self._greetings or (not wire.initiated and self._greetings.add(wire, _LearnerGreeting())):
            self._greetings[wire].spoke = True
            self._handshake(wire, read_message(event.frames))

    def _handshake(self, wire: Wire, message: Message) -> None:
        greeting = self._greetings[wire]
        if message.op == clp.Op.KNOCK and not wire.initiated:
            self._hello(wire, from_meta(message.meta, Knock).session)
        elif message.op == clp.Op.WELCOME:
            self._welcomed(wire, greeting, from_meta(message.meta, Welcome))
        elif message.op == clp.Op.ERROR:
            self._greetings.pop(wire)
            wire.close()
            self._refused(wire, message)
        elif message.op == clp.Op.CLOSE:
            self._closed(wire, message)
        else:
            raise BadMessage(f"{clp.Op(message.op).name} in the handshake")

    def _refused(self, wire: Wire, message: Message) -> None:
        """The learner refused this simulator; UserError when it always would."""
        text = f"The learner at {wire.peer} refused this simulator: {message.text}."
        if wire.initiated and message.status in (clp.Status.E_VERSION, clp.Status.E_AUTH, clp.Status.E_SPACE_MISMATCH):
            raise UserError(text)
        self._peer_log.warning(text)

    def _hello(self, wire: Wire, wanted: int = 0) -> None:
        """Send HELLO with the detached session to resume, if any; a learner connected to from here is the only one."""
        greeting = self._greetings[wire]
        waiting = [s for s in self._sessions if s.wire is None and (wire.initiated or s.number == wanted)]
        resumes = waiting[-1] if waiting else None
        greeting.resumes = resumes
        keeper = self._keeper
        capabilities = ["raw_reward", *(("rollout", *keeper.capabilities) if keeper else ())]
        hello = Hello(
            list(OURS), "corral-python", self._name, 0, self._instance, greeting.nonce,
            resumes.number if resumes else 0, self._spec.observation.to_json(), self._spec.action.to_json(),
            1, self._num_slots, 1, keeper.level if keeper else 0, keeper.exact if keeper else True, capabilities,
        )  # fmt: skip
        wire.send(Message(clp.Op.HELLO, meta=to_meta(hello)).frames())

    def _welcomed(self, wire: Wire, greeting: _LearnerGreeting, welcome: Welcome) -> None:
        if not is_proven(self._token, welcome.proof, LEARNER, greeting.nonce, welcome.nonce):
            text = f"the learner at {wire.peer} did not prove that it knows the token"
            self._refuse(wire, clp.Status.E_AUTH, text)
            if wire.initiated:
                raise UserError(f"{text[0].upper()}{text[1:]}; start it with the same token file.")
            return
        if welcome.version[0] != clp.MAJOR:
            self._refuse(wire, clp.Status.E_VERSION, f"version {welcome.version[0]} was chosen, this is {clp.MAJOR}")
            return
        session = greeting.resumes
        if not welcome.resumed:
            if session is not None and session.wire is None:  # the learner no longer knows it
                self._end(session)
            if len(self._sessions) >= _MAX_SESSIONS:
                self._refuse(wire, clp.Status.E_FULL, f"{_MAX_SESSIONS} learners are connected already")
                return
            count = min(self._num_slots, welcome.limits.slots)
            slots = Slots(self._factory, self._name, self._spec, count, self._keeper, welcome.snapshots)
            session = _Session(welcome.session, slots, welcome, wire)
            self._sessions.append(session)
        elif session not in self._sessions or session.number != welcome.session:
            self._refuse(wire, clp.Status.E_SESSION, f"session {welcome.session} is not known here")
            return
        elif session.wire is not None:  # dead, but this side has not noticed yet
            del self._by_wire[session.wire]
            session.wire.close()
        self._greetings.pop(wire)
        session.wire = wire
        self._by_wire[wire] = session
        wire.max_bytes = welcome.limits.message
        proof = prove(self._token, SIMULATOR, greeting.nonce, welcome.nonce)
        wire.send(Message(clp.Op.READY, meta=to_meta(Ready(proof))).frames())

    def _refuse(self, wire: Wire, status: clp.Status, text: str) -> None:
        self._peer_log.warning(f"{wire.peer}: {text}; closed.")
        wire.send(Message(clp.Op.ERROR, clp.NO_REPLY, status, meta={"text": text}).frames())
        self._greetings.pop(wire)
        session = self._by_wire.pop(wire, None)
        if session is not None:
            self._end(session)
        wire.close()

    def _take(self, session: _Session, event: Event) -> None:
        if event.lost is not None:
            del self._by_wire[event.wire]
            session.wire, session.detached_at = None, time.monotonic()
            return
        if event.frames is None:
            return
        message = read_message(event.frames)
        if message.op in (clp.Op.CLOSE, clp.Op.ERROR):
            self._closed(event.wire, message)
            if message.op == clp.Op.ERROR:
                self._refused(event.wire, message)
            return
        if message.session != session.number or message.layout != self._layout:
            raise BadMessage(f"session {message.session}, layout {message.layout:#x}")
        if message.op == clp.Op.DROP:
            self._drop(session, message)
        elif message.flags & clp.REPLY:
            return
        elif message.seq <= session.done_until:
            kept = session.replies.get(message.seq)
            if kept is not None and session.wire is not None:
                session.wire.send(kept)
        else:
            self._answer(session, message)

    def _answer(self, session: _Session, message: Message) -> None:
        if not session.done_until and session.wire is not None:
            log.info("a learner at %s uses this simulator.", session.wire.peer)
        started = time.perf_counter()
        self._clock.begin(message.aux / 1000)
        reply = Message(message.op, clp.REPLY, 0, message.seq, session.number, self._layout, message.batch)
        try:
            if message.batch > session.welcome.limits.batch:
                raise BadRequest(
                    f"{message.batch} rows, at most {session.welcome.limits.batch}", clp.Status.E_TOO_LARGE
                )
            result = self._carry_out(session.slots, message)
            if isinstance(result, SlotReply):
                reply.payload = result.payload
                if result.messages:
                    most = session.welcome.limits.info
                    reply.meta = {"rows": {row: _last(text, most) for row, text in result.messages.items()}}
            else:
                reply.meta = result
        except (BadRequest, BadMessage) as error:
            reply.status = error.status if isinstance(error, BadRequest) else clp.Status.E_BAD_REQUEST
            reply.flags |= clp.FAILED
            reply.meta = {"text": f"{clp.Op(message.op).name}: {error}"}
        reply.aux = min(int((time.perf_counter() - started) * 1e6), 0xFFFFFFFF)
        self._clock.end()
        frames = reply.frames()
        session.done_until = message.seq
        session.replies[message.seq] = frames
        while len(session.replies) > session.welcome.window:
            session.replies.popitem(last=False)
        if session.wire is not None:
            session.wire.send(frames)

    def _carry_out(self, slots: Slots, message: Message) -> SlotReply | dict[str, Any]:
        op, batch, payload = message.op, message.batch, message.payload
        if op == clp.Op.HEARTBEAT:
            return SlotReply()
        if op == clp.Op.STATS:
            return {
                "slots": self._num_slots, "steps": slots.steps, "episodes": slots.episodes, "faults": slots.faults,
                "snapshots": len(slots.states or ()), "snapshot_bytes": slots.states.nbytes if slots.states else 0,
                "rss": resident_bytes(), "work_us": 0,
            }  # fmt: skip
        if batch < 1:
            raise BadRequest("no rows")
        if op == clp.Op.STEP:
            return slots.step(batch, payload, bool(message.flags & clp.AUTORESET))
        if op in _PLAIN:
            return _PLAIN[op](slots, batch, payload)
        if op == clp.Op.LOAD:
            return slots.load(batch, payload, bool(message.flags & clp.WANT_OBS))
        if op == clp.Op.ROLLOUT:
            steps = (message.meta or {}).get("steps")
            return slots.rollout(batch, payload, steps if isinstance(steps, int) else 0)
        raise BadRequest("this simulator does not support it", clp.Status.E_UNSUPPORTED)

    def _drop(self, session: _Session, message: Message) -> None:
        states = session.slots.states
        generation = (message.meta or {}).get("generation")
        if states is None:
            return
        if isinstance(generation, int):
            states.drop_where(lambda key: key >> clp.GENERATION_BITS == generation)
        elif len(message.payload) == 1 and len(message.payload[0]) == 8 * message.batch:
            states.drop(np.frombuffer(message.payload[0], "<u8"))

    def _closed(self, wire: Wire, message: Message) -> None:
        """Handle CLOSE: if this side connected to the learner and the run is over, stop serving."""
        session = self._by_wire.pop(wire, None)
        self._greetings.pop(wire)
        if session is not None:
            self._end(session)
        self._over = wire.initiated and bool((message.meta or {}).get("over"))
        wire.close()

    def _end(self, session: _Session) -> None:
        if session in self._sessions:
            self._sessions.remove(session)
        if session.wire is not None:
            self._by_wire.pop(session.wire, None)
        session.slots.close()


def _last(text: str, most: int) -> str:
    """The last `most` bytes of a text: the end of a traceback tells what happened."""
    return text.encode()[-most:].decode(errors="ignore") if most else ""
