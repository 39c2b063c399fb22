"""All simulators of a learner: connections, handshakes, and sessions that end or are resumed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from corral.core.errors import UserError
from corral.core.log import RateLimitedLog
from corral.core.types import EnvSpec
from corral.link import protocol as clp
from corral.link.auth import LEARNER, SIMULATOR, is_proven, new_nonce, prove
from corral.link.client.session import SessionClosed, Simulator, SimulatorSession
from corral.link.control import Budget, Hello, Knock, Ready, Welcome, from_meta, to_meta
from corral.link.greetings import Greeting, Greetings
from corral.link.layout import read_space, require_modest, space_difference
from corral.link.message import BadMessage, Message, read_message
from corral.link.protocol import Limits, choose_limits
from corral.link.transports.base import Binding, Event, Wire

log = logging.getLogger("corral.link")

_HANDSHAKE_S = 10.0
_MAX_GREETINGS, _MAX_SESSIONS = 256, 1024
_CHECK_EVERY_S = 0.25
_TURN_S = 0.001  # one wait, while other threads wait for their turn
_YIELD_S = 50e-6  # otherwise the thread that just had its turn would take the next one too
_LEARNER_HERE = "is another learner, and a learner listens here"  # recognized by that other learner
_FATAL = {clp.Status.E_VERSION, clp.Status.E_AUTH, clp.Status.E_SPACE_MISMATCH}


def _most_row_bytes(hello: Hello) -> int:
    """At least the bytes of a row of these spaces on the wire, without building them."""
    observation, action = require_modest(hello.observation, "observation"), require_modest(hello.action, "action")
    return 2 * observation + action + 8 * (hello.players + 1) + 128


class Refused(Exception):
    """A simulator that cannot be accepted, with the status to send."""

    def __init__(self, status: clp.Status, text: str):
        super().__init__(text)
        self.status = status


@dataclass
class _SimulatorGreeting(Greeting):
    """A connection that has not reached READY. Its spaces are not built before its proof: they may be large."""

    hello: Hello | None = None
    nonce: bytes = b""
    limits: Limits = field(default_factory=Limits)
    window: int = 0
    resumes: SimulatorSession | None = None
    number: int = 0


@dataclass
class FleetMember:
    """A user of the fleet's simulators, notified when one joins or disconnects."""

    joined: Callable[[SimulatorSession], None]
    lost: Callable[[SimulatorSession, str, str], None]  # session, kind of fault (killed | hung | raised), and reason
    lend: Callable[[int], int] = lambda most: 0  # free at most so many slots for another user; returns how many
    waiting: Callable[[], int] = lambda: 0  # its environments without a slot
    borrows: bool = False  # whether it has slots that another user has lent


class Fleet:
    """The sessions of one binding. Messages are handled only in `poll`."""

    def __init__(
        self, binding: Binding, token: bytes | None = None, reconnect_s: float = 5.0, budget: Budget | None = None
    ):
        self.binding, self._token, self._reconnect_s = binding, token, reconnect_s
        self._budget = budget or Budget()
        self.lock = threading.RLock()
        self.spec: EnvSpec | None = None  # of the first simulator; all others must have the same spaces
        self.players = 1
        self._rows_kind: Any = None
        self._described: Any = None  # its spaces as its HELLO had them
        self.members: list[FleetMember] = []
        self.sessions: dict[int, SimulatorSession] = {}
        self.periodic: list[Callable[[float], None]] = []  # called a few times per second during `poll`
        self.gone: Callable[[bytes], bool] = lambda instance: False
        """Whether the process of this instance is known to have ended."""
        self.admits: Callable[[bytes], bool] = lambda instance: True
        """Whether the process of this instance may join; one that the learner started has an instance nobody knows."""
        self._by_wire: dict[Wire, SimulatorSession] = {}
        self._greetings: Greetings[_SimulatorGreeting] = Greetings(_MAX_GREETINGS, _HANDSHAKE_S)
        self._numbers = int.from_bytes(new_nonce()[:3], "little")
        self._last_check = time.monotonic()
        self._threads: set[int] = set()  # threads that have waited for messages
        self._turn = 0  # counts the waits that brought messages
        self._fatal: str | None = None
        self._peer_log = RateLimitedLog(log)

    def poll(self, timeout_s: float) -> None:
        """Wait for messages and handle them; UserError when a simulator that was connected to cannot be used.

        Several threads may share a fleet: each handles the messages of all, in turns short enough to send in between,
        and returns after another thread's turn, because that may have brought the message it waits for.
        """
        self._threads.add(threading.get_ident())
        turn = self._turn
        if len(self._threads) > 1:
            time.sleep(_YIELD_S)
            timeout_s = min(timeout_s, _TURN_S)
        with self.lock:
            if self._turn != turn:
                return
            events = self.binding.poll(timeout_s)
            self._turn += bool(events)
            for event in events:
                session = self._by_wire.get(event.wire)
                if session is not None:
                    self._take(session, event)
                else:
                    self._greet(event)
            now = time.monotonic()
            if now - self._last_check > _CHECK_EVERY_S:
                self._last_check = now
                self._check(now)
                for call in self.periodic:
                    call(now)
            if self._fatal is not None:
                raise UserError(self._fatal)

    def has_lent(self, member: FleetMember) -> bool:
        """Whether another user has slots that this one, or a third, has lent: they come back when that one is done."""
        return any(other.borrows for other in self.members if other is not member)

    def give_up(
        self, session: SimulatorSession, kind: str, reason: str, status: clp.Status = clp.Status.E_DEADLINE
    ) -> None:
        if session.lost is not None:
            return
        self._send_error(session.wire, status, reason, session)
        self._drop_session(session, kind, reason)

    def dismiss(self, session: SimulatorSession) -> None:
        session.send_one_way(clp.Op.CLOSE, meta={"reason": "no longer needed", "over": True})
        self._drop_session(session, "killed", f"{session.name} was disconnected")

    def close(self, reason: str = "the run is over") -> None:
        with self.lock:
            for session in self.sessions.values():
                session.send_one_way(clp.Op.CLOSE, meta={"reason": reason, "over": True})
            for wire in self._greetings:
                wire.send(Message(clp.Op.CLOSE, clp.NO_REPLY, meta={"reason": reason, "over": True}).frames())
            self.sessions.clear()
            self._by_wire.clear()
            self._greetings.clear()
            self.binding.close()

    def _take(self, session: SimulatorSession, event: Event) -> None:
        if event.lost is not None:
            del self._by_wire[event.wire]
            session.detach()
            if self._reconnect_s <= 0 or self.gone(session.simulator.hello.instance):
                self._drop_session(session, "killed", f"the connection to {session.name} is lost: {event.lost}")
            return
        if event.frames is None:
            return
        try:
            session.take(event.frames)
        except SessionClosed as goodbye:
            self._drop_session(session, "killed", f"{session.name} left: {goodbye}")
        except BadMessage as error:
            self.give_up(session, "raised", f"{session.name} sent {error}", clp.Status.E_PROTOCOL)

    def _drop_session(self, session: SimulatorSession, kind: str, reason: str) -> None:
        session.lost = reason
        self.sessions.pop(session.number, None)
        self._by_wire.pop(session.wire, None)
        session.wire.close()
        session.waiting.clear()
        for member in list(self.members):
            member.lost(session, kind, reason)

    def _check(self, now: float) -> None:
        for session in list(self.sessions.values()):
            if session.detached_at is not None:
                instance_gone, away_s = self.gone(session.simulator.hello.instance), now - session.detached_at
                if away_s > self._reconnect_s or instance_gone or session.overdue(now) is not None:
                    how = "its process has ended" if instance_gone else f"it did not reconnect within {away_s:.1f} s"
                    self._drop_session(session, "killed", f"the connection to {session.name} is lost, {how}")
            elif (late := session.overdue(now)) is not None:
                reason = f"{session.name} did not answer {clp.Op(late.op).name} within {late.deadline_s:g} s"
                self.give_up(session, "hung", reason)
        for wire, limit in self._greetings.overdue():
            self._greetings.pop(wire)
            self._peer_log.warning(f"{wire.peer} did not complete the handshake within {limit:g} s; closed.")
            wire.close()

    def _greet(self, event: Event) -> None:
        wire = event.wire
        if event.lost is not None:
            self._greetings.pop(wire)
        elif event.frames is None:
            if self._greetings.add(wire, _SimulatorGreeting()) and wire.initiated:
                waiting = [s.number for s in self.sessions.values() if s.detached_at and s.wire.peer == wire.peer]
                wire.send(Message(clp.Op.KNOCK, meta=to_meta(Knock(session=max(waiting, default=0)))).frames())
        elif wire in self._greetings or (not wire.initiated and self._greetings.add(wire, _SimulatorGreeting())):
            greeting = self._greetings[wire]
            greeting.spoke = True
            try:
                self._handshake(wire, greeting, event.frames)
            except BadMessage as error:
                self._refuse(wire, Refused(clp.Status.E_PROTOCOL, f"{wire.peer} sent {error}"))
            except Refused as refused:
                self._refuse(wire, refused)

    def _handshake(self, wire: Wire, greeting: _SimulatorGreeting, frames: Any) -> None:
        message = read_message(frames)
        if message.op in (clp.Op.ERROR, clp.Op.CLOSE):
            self._greetings.pop(wire)
            wire.close()
            if message.op == clp.Op.ERROR and wire.initiated and message.text.endswith(_LEARNER_HERE):
                self._fatal = f"Another learner listens at {wire.peer}, and simulators connect to it: use another URL."
            elif message.op == clp.Op.ERROR:
                text = f"The simulator at {wire.peer} refused: {clp.status_name(message.status)}, {message.text}."
                self._report_refusal(wire, message.status, text)
        elif message.op == clp.Op.HELLO and greeting.hello is None:
            self._welcome(wire, greeting, from_meta(message.meta, Hello))
        elif message.op == clp.Op.READY and greeting.hello is not None:
            self._ready(wire, greeting, greeting.hello, from_meta(message.meta, Ready))
        elif message.op == clp.Op.KNOCK and not wire.initiated:
            raise Refused(clp.Status.E_PROTOCOL, f"{wire.peer} {_LEARNER_HERE}")
        else:
            expected = "HELLO" if greeting.hello is None else "READY"
            raise BadMessage(f"{clp.Op(message.op).name} where {expected} was expected")

    def _welcome(self, wire: Wire, greeting: _SimulatorGreeting, hello: Hello) -> None:
        if clp.MAJOR not in [major for major, _ in hello.versions]:
            theirs = ", ".join(f"{a}.{b}" for a, b in hello.versions[:8]) or "none"
            raise Refused(
                clp.Status.E_VERSION,
                f"{wire.peer} uses version {theirs} of the protocol, this learner {clp.MAJOR}.{clp.MINOR}; "
                "build it with this learner's corral.hpp",
            )
        row_bytes = _most_row_bytes(hello)
        if len(self.sessions) >= _MAX_SESSIONS:
            raise Refused(clp.Status.E_FULL, f"{_MAX_SESSIONS} simulators are connected already")
        if not self.admits(hello.instance):
            raise Refused(
                clp.Status.E_AUTH,
                f"{wire.peer} was not started by this learner, whose --sim starts all of its simulators: omit --sim, "
                "or give both sides a --token-file",
            )
        greeting.hello, greeting.nonce = hello, new_nonce()
        old = self.sessions.get(hello.session)
        if old is not None and old.simulator.hello.instance == hello.instance:
            greeting.resumes, greeting.number = old, old.number
        else:
            self._numbers = self._numbers % 0xFFFFFFFE + 1
            greeting.number = self._numbers
        greeting.limits, greeting.window = choose_limits(row_bytes)
        minor = max(minor for major, minor in hello.versions if major == clp.MAJOR)
        proof = prove(self._token, LEARNER, hello.nonce, greeting.nonce)
        welcome = Welcome(
            (clp.MAJOR, min(minor, clp.MINOR)), greeting.number, greeting.resumes is not None, greeting.nonce, proof,
            greeting.window, greeting.limits, self._budget,
        )  # fmt: skip
        wire.send(Message(clp.Op.WELCOME, meta=to_meta(welcome)).frames())

    def _spec_of(self, hello: Hello) -> EnvSpec:
        """The spaces of a simulator, built only if they are described in other words than those of the others."""
        if self.spec is not None and (hello.observation, hello.action) == self._described:
            return replace(self.spec, name=hello.env)
        observation, action = read_space(hello.observation, "observation"), read_space(hello.action, "action")
        return EnvSpec(observation.space, action.space, hello.env)

    def _require_same(self, wire: Wire, hello: Hello, spec: EnvSpec) -> None:
        kind = hello.players, "raw_reward" in hello.capabilities
        if self.spec is None:
            return
        found = space_difference(self.spec.observation, spec.observation, "observation") or space_difference(
            self.spec.action, spec.action, "action"
        )
        if found is None and kind != self._rows_kind:
            found = f"{kind[0]} players and raw_reward={kind[1]} where others have {self._rows_kind}"
        if found is not None:
            raise Refused(clp.Status.E_SPACE_MISMATCH, f"{hello.env} at {wire.peer} has {found}")

    def _ready(self, wire: Wire, greeting: _SimulatorGreeting, hello: Hello, ready: Ready) -> None:
        if not is_proven(self._token, ready.proof, SIMULATOR, hello.nonce, greeting.nonce):
            raise Refused(
                clp.Status.E_AUTH,
                f"{hello.env} at {wire.peer} did not prove that it knows the token; give it the same --token-file",
            )
        simulator = Simulator(hello, self._spec_of(hello))
        self._require_same(wire, hello, simulator.spec)
        self._greetings.pop(wire)
        session = greeting.resumes
        if session is not None and session.lost is None:
            log.info("%s reconnected.", session.name)
            self._by_wire.pop(session.wire, None)
            session.attach(wire)
            self._by_wire[wire] = session
            return
        if session is not None:
            raise Refused(clp.Status.E_SESSION, f"session {greeting.number} was already given up")
        for old in [s for s in self.sessions.values() if s.simulator.hello.instance == hello.instance]:
            if old.detached_at is not None:  # the simulator has forgotten that session
                self._drop_session(old, "killed", f"{old.name} reconnected without its session")
        if self.spec is None:
            self.spec, self.players = simulator.spec, hello.players
            self._described = hello.observation, hello.action
            self._rows_kind = hello.players, "raw_reward" in hello.capabilities
        session = SimulatorSession(greeting.number, simulator, wire, greeting.limits, greeting.window)
        wire.max_bytes = greeting.limits.message
        self.sessions[session.number] = self._by_wire[wire] = session
        log.info("%s joined (%s, up to %d environments).", session.name, hello.sdk, hello.slots)
        for member in list(self.members):
            member.joined(session)

    def _refuse(self, wire: Wire, refused: Refused) -> None:
        self._greetings.pop(wire)
        self._send_error(wire, refused.status, str(refused), None)
        wire.close()
        self._report_refusal(wire, refused.status, f"A simulator was refused: {refused}.")

    def _report_refusal(self, wire: Wire, status: int, text: str) -> None:
        """Fatal if this side connected to the simulator; if simulators connect to this side, others may fit."""
        if wire.initiated and status in _FATAL:
            self._fatal = text
        else:
            self._peer_log.warning(text)

    def _send_error(self, wire: Wire, status: clp.Status, text: str, session: SimulatorSession | None) -> None:
        number, layout = (session.number, session.simulator.layout) if session else (0, 0)
        wire.send(Message(clp.Op.ERROR, clp.NO_REPLY, status, 0, number, layout, meta={"text": text}).frames())
