"""The learner's side of one simulator: numbered requests, a window of them in flight, each answered once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from corral.core.encoding import Buffer
from corral.core.types import EnvSpec
from corral.link import protocol as clp
from corral.link.control import Hello
from corral.link.layout import RowsLayout, layout_hash, space_group
from corral.link.message import BadMessage, Message, printable, read_message
from corral.link.protocol import Limits, rows_per_message
from corral.link.transports.base import Wire

_STEP = int(clp.Op.STEP)
_MAX_UNSOLICITED = 1000  # messages without a request between two replies
_SMOOTHING = 0.1  # of the measured time per row

Done = Callable[[Message], None]


@dataclass(slots=True)
class Request:
    """A request that is in flight or queued."""

    seq: int
    op: int
    batch: int
    frames: list[Buffer]
    deadline_s: float
    done: Done
    sent_at: float = 0.0


class Simulator:
    """What HELLO declares, in the terms that requests need."""

    def __init__(self, hello: Hello, spec: EnvSpec):
        self.hello, self.spec = hello, spec
        self.layout = layout_hash(spec.observation, spec.action)
        self.observation, self.action = space_group(spec.observation), space_group(spec.action)
        self.rows = RowsLayout(hello.players, "raw_reward" in hello.capabilities).group()
        # In the largest message that holds a row.
        self.row_bytes = 2 * self.observation.row_bytes + self.rows.row_bytes + self.action.row_bytes + 64


class SimulatorSession:
    """The session with one accepted simulator."""

    def __init__(self, number: int, simulator: Simulator, wire: Wire, limits: Limits, window: int):
        self.number, self.simulator, self.wire = number, simulator, wire
        self.limits, self.window = limits, window
        self.max_rows = rows_per_message(limits, simulator.row_bytes)
        self.lost: str | None = None
        self.detached_at: float | None = None
        self.row_s = 0.0  # seconds that the simulator takes per row, smoothed; 0 while unknown
        self.waiting: dict[int, Request] = {}
        self._queue: deque[Request] = deque()
        self._seq = 0
        self._unsolicited = 0
        self._taken, self._free = 0, list[int]()
        self._generation = 0
        self.episodes = 0  # number of episodes that ended here
        self.retiring = False  # it gets no more environments; those it has move away as their episodes end

    @property
    def name(self) -> str:
        return f"{self.simulator.hello.env} at {self.wire.peer}"

    @property
    def used_slots(self) -> int:
        return self._taken - len(self._free)

    @property
    def has_room(self) -> bool:
        return not self.retiring and self.room > 0

    @property
    def room(self) -> int:
        return min(self.simulator.hello.slots, self.limits.slots) - self.used_slots

    def take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._taken += 1
        return self._taken - 1

    def free_slot(self, slot: int) -> None:
        self._free.append(slot)

    def take_generation(self) -> int:
        """A generation of state ids; one is reused only after 16 million others."""
        self._generation = self._generation % (clp.GENERATIONS - 1) + 1
        return self._generation

    def submit(
        self,
        op: int,
        batch: int,
        payload: Sequence[Buffer],
        done: Done,
        *,
        deadline_s: float,
        flags: int = 0,
        meta: dict[str, Any] | None = None,
    ) -> Request:
        """Send a request; `done` gets the reply. It is not called when the session is lost."""
        self._seq += 1
        millis = min(int(deadline_s * 1000), 0xFFFFFFFF)
        if meta is None:
            head = clp.HEADER.pack(
                clp.MAGIC, clp.MAJOR, op, flags, 0, self._seq, self.number, self.simulator.layout, batch, millis
            )
            frames = [head, *payload]
        else:
            message = Message(op, flags, 0, self._seq, self.number, self.simulator.layout, batch, millis, meta, payload)
            frames = message.frames()
        request = Request(self._seq, op, batch, frames, deadline_s, done)
        if len(self.waiting) < self.window and self.detached_at is None:
            self._send(request)
        else:
            self._queue.append(request)
        return request

    def send_one_way(
        self, op: int, payload: Sequence[Buffer] = (), batch: int = 0, meta: dict[str, Any] | None = None
    ) -> None:
        self._seq += 1
        message = Message(
            op, clp.NO_REPLY, 0, self._seq, self.number, self.simulator.layout, batch, 0, meta, list(payload)
        )
        self.wire.send(message.frames())

    def take(self, frames: Sequence[Buffer]) -> None:
        message = read_message(frames)
        if message.session != self.number or message.layout != self.simulator.layout:
            raise BadMessage(
                f"session {message.session} and layout {message.layout:#x}, expected {self.number} and "
                f"{self.simulator.layout:#x}"
            )
        request = self.waiting.get(message.seq) if message.flags & clp.REPLY else None
        if request is None:
            self._take_unsolicited(message)
            return
        if request.op != message.op:
            raise BadMessage(f"a reply to op {message.op}, expected one to op {request.op}")
        del self.waiting[message.seq]
        self._unsolicited = 0
        if request.batch and message.op == _STEP:
            each = message.aux * 1e-6 / request.batch
            self.row_s = each if self.row_s == 0 else self.row_s + _SMOOTHING * (each - self.row_s)
        if self._queue:
            self._send(self._queue.popleft())
        request.done(message)

    def overdue(self, now: float) -> Request | None:
        """A request whose deadline has passed; while detached, also one that was never sent."""
        for request in self.waiting.values():
            if now - request.sent_at > request.deadline_s:
                return request
        if self.detached_at is not None and self._queue and now - self.detached_at > self._queue[0].deadline_s:
            return self._queue[0]
        return None

    def detach(self) -> None:
        self.detached_at = time.monotonic()

    def attach(self, wire: Wire) -> None:
        self.wire.close()
        self.wire, self.detached_at = wire, None
        self.wire.max_bytes = self.limits.message
        for request in self.waiting.values():  # their deadlines keep running, however often it reconnects
            self.wire.send(request.frames)
        while self._queue and len(self.waiting) < self.window:
            self._send(self._queue.popleft())

    def _send(self, request: Request) -> None:
        request.sent_at = time.monotonic()
        self.waiting[request.seq] = request
        self.wire.send(request.frames)

    def _take_unsolicited(self, message: Message) -> None:
        """Handle a message that is not a reply: an error, a goodbye, or a duplicate reply."""
        self._unsolicited += 1
        if self._unsolicited > _MAX_UNSOLICITED:
            raise BadMessage(f"more than {_MAX_UNSOLICITED} messages without a request")
        if message.op == clp.Op.HEARTBEAT and not message.flags & clp.REPLY:
            self.wire.send(Message(message.op, clp.REPLY, 0, message.seq, self.number, self.simulator.layout).frames())
        elif message.op == clp.Op.CLOSE:
            reason = (message.meta or {}).get("reason", "")
            raise SessionClosed(printable(reason) if isinstance(reason, str) else "")
        elif message.op == clp.Op.ERROR:
            raise SessionClosed(f"{clp.status_name(message.status)}: {message.text}")


class SessionClosed(Exception):
    """The simulator closed the session; the text is its reason."""
