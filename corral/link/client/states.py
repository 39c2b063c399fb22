"""States of environments inside a simulator, from the learner's side: save, load, expand, drop, export, import.

Ids are chosen here, a generation and a counter, so a whole tree is dropped by its generation. Every call is answered
before it returns, or raises; rows that could not be served have a status.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from corral.core.encoding import Buffer
from corral.core.errors import EnvFailed, UserError
from corral.core.types import Array, Tree
from corral.link import protocol as clp
from corral.link.client.fleet import Fleet
from corral.link.client.session import Simulator, SimulatorSession
from corral.link.message import BadMessage, Message

_MAX_STEPS = 1 << 16


@dataclass
class StateReplies:
    """What came of each row. Observations are None where none were asked for."""

    reward: Array  # [B, players] float64
    terminated: Array  # [B] bool
    truncated: Array  # [B] bool
    faulty: Array  # [B] bool
    status: Array  # [B] uint16, 0 is good
    to_play: Array  # [B] int8
    obs: Tree | None
    texts: dict[int, str]

    def require_good(self, what: str) -> None:
        """EnvFailed, naming the first row that went wrong and why."""
        bad = np.flatnonzero(self.status)
        if len(bad):
            row = int(bad[0])
            name = clp.status_name(int(self.status[row]))
            raise EnvFailed(f"{what}: row {row} of {len(self.status)}: {name} {self.texts.get(row, '')}".rstrip())


class States:
    """The states of one session. `slots` are places of environments in it, beside those that VecEnvs have."""

    def __init__(self, fleet: Fleet, session: SimulatorSession, timeout_s: float = 60.0):
        self._fleet, self.session, self._timeout_s = fleet, session, timeout_s
        self._generation, self._counter = session.take_generation(), 0

    @property
    def level(self) -> int:
        """What the simulator can do: 0 nothing, 1 repeat, 2 keep in memory, 3 expand on threads, 4 export."""
        return self.session.simulator.hello.level

    def new_ids(self, count: int) -> Array:
        """Ids that nothing has yet."""
        first = self._generation << clp.GENERATION_BITS | self._counter + 1
        self._counter += count
        return np.arange(first, first + count, dtype="<u8")

    def next_generation(self, *, drop: bool = True) -> None:
        """From now on ids are of another generation; the states of the last are dropped."""
        if drop:
            self.session.tell(clp.Op.DROP, meta={"generation": self._generation})
        self._generation, self._counter = self.session.take_generation(), 0

    def drop(self, ids: Array) -> None:
        """Forget these."""
        self.session.tell(clp.Op.DROP, [np.asarray(ids, "<u8").tobytes()], len(ids))

    def take_slots(self, count: int) -> Array:
        """Slots of our own."""
        return np.array([self.session.take_slot() for _ in range(count)], "<u4")

    def free_slots(self, slots: Array) -> None:
        """Give them back."""
        for slot in slots.tolist():
            self.session.free_slot(slot)

    def reset(self, slots: Array, seeds: Array) -> StateReplies:
        """Start episodes."""
        return self._rows(clp.Op.RESET, [_u4(slots), _u8(seeds)], len(slots))

    def step(self, slots: Array, actions: Tree, *, autoreset: bool = False) -> StateReplies:
        """Step slots; where an episode ends, it stays there unless `autoreset`."""
        flags = clp.AUTORESET if autoreset else 0
        return self._rows(clp.Op.STEP, [_u4(slots), self._actions(actions, len(slots))], len(slots), flags=flags)

    def save(self, slots: Array, ids: Array | None = None) -> tuple[Array, StateReplies]:
        """Keep the states of slots; returns their ids."""
        ids = self.new_ids(len(slots)) if ids is None else ids
        return ids, self._rows(clp.Op.SAVE, [_u4(slots), _u8(ids)], len(slots), obs=False)

    def load(self, slots: Array, ids: Array) -> StateReplies:
        """Put slots where their states were; observations as they were then."""
        return self._rows(clp.Op.LOAD, [_u4(slots), _u8(ids)], len(slots), flags=clp.WANT_OBS)

    def expand(
        self, parents: Array, actions: Tree, children: Array | None = None, seeds: Array | None = None
    ) -> tuple[Array, StateReplies]:
        """Step from states, keep what comes out; returns the children's ids. Rows do not depend on each other."""
        children = self.new_ids(len(parents)) if children is None else children
        payload = [_u8(parents), self._actions(actions, len(parents)), _u8(children)]
        if seeds is not None:
            payload.append(_u8(seeds))
        return children, self._rows(clp.Op.EXPAND, payload, len(parents))

    def rollout(self, parents: Array, actions: Tree, steps: int) -> tuple[Array, Array, StateReplies]:
        """Step from states, `steps` actions each ([B * steps, ...]); rewards [B, steps], lengths [B], last rows."""
        if not 1 <= steps <= _MAX_STEPS:
            raise UserError(f"A rollout has 1 to {_MAX_STEPS} steps, got {steps}.")
        batch = len(parents)
        payload = [_u8(parents), self._actions(actions, batch * steps)]
        reply = self._ask(clp.Op.ROLLOUT, payload, batch, meta={"steps": steps})
        if len(reply.payload) != 4 or len(reply.payload[0]) != 8 * batch * steps or len(reply.payload[1]) != 4 * batch:
            raise EnvFailed(f"{self.session.name} answered a rollout with frames that do not fit.")
        rewards = np.frombuffer(reply.payload[0], "<f8").reshape(batch, steps).copy()
        lengths = np.frombuffer(reply.payload[1], "<u4").copy()
        return rewards, lengths, self._read(reply, reply.payload[2:], batch)

    def export(self, ids: Array) -> tuple[list[bytes], StateReplies]:
        """States as bytes, for `take_in` of any simulator of the same environment."""
        batch = len(ids)
        reply = self._ask(clp.Op.EXPORT, [_u8(ids)], batch)
        if len(reply.payload) != 3 or len(reply.payload[1]) != 8 * batch:
            raise EnvFailed(f"{self.session.name} answered an export with frames that do not fit.")
        blobs, at = [], 0
        for size in np.frombuffer(reply.payload[1], "<u8").tolist():
            blobs.append(bytes(reply.payload[2][at : at + size]))
            at += size
        if at != len(reply.payload[2]):
            raise EnvFailed(f"{self.session.name} answered an export with sizes that are not those of the states.")
        return blobs, self._read(reply, reply.payload[:1], batch)

    def take_in(self, blobs: Sequence[bytes], ids: Array | None = None) -> tuple[Array, StateReplies]:
        """Keep states that were exported; returns their ids."""
        ids = self.new_ids(len(blobs)) if ids is None else ids
        sizes = np.array([len(blob) for blob in blobs])
        return ids, self._rows(clp.Op.IMPORT, [_u8(ids), _u8(sizes), b"".join(blobs)], len(blobs), obs=False)

    def stats(self) -> dict[str, Any]:
        """What the simulator has done, and what its states take."""
        return dict(self._ask(clp.Op.STATS, [], 0).meta or {})

    def _actions(self, actions: Tree, count: int) -> Buffer:
        layout = self.session.simulator.spec.action
        return self.session.simulator.action.write(layout.batch(actions, count), count)

    def _rows(self, op: int, payload: list[Buffer], batch: int, *, flags: int = 0, obs: bool = True) -> StateReplies:
        reply = self._ask(op, payload, batch, flags)
        return self._read(reply, reply.payload if obs else reply.payload[:1], batch)

    def _read(self, reply: Message, payload: Sequence[Buffer], batch: int) -> StateReplies:
        simulator = self.session.simulator
        try:
            table = simulator.rows.read(payload[0], batch)
            views = simulator.observation.read(payload[1], batch) if len(payload) > 1 else None
            leaves = None if views is None else [leaf.copy() for leaf in views]
        except (BadMessage, IndexError) as error:
            raise EnvFailed(f"{self.session.name} answered with {error}.") from error
        players = simulator.hello.players
        to_play = table.pop().copy() if players > 1 else np.zeros(batch, np.int8)
        status, flags = table.pop().copy(), table.pop()
        return StateReplies(
            table[0].copy(),
            (flags & clp.TERMINATED) != 0,
            (flags & clp.TRUNCATED) != 0,
            (flags & clp.FAULTY) != 0,
            status,
            to_play,
            None if leaves is None else simulator.spec.observation.unflatten(leaves),
            _row_messages(reply, batch),
        )

    def _ask(
        self, op: int, payload: list[Buffer], batch: int, flags: int = 0, meta: dict[str, Any] | None = None
    ) -> Message:
        """The reply, whose frames are copies; EnvFailed when the request is refused or the simulator is lost."""
        answer: list[Message] = []

        def done(reply: Message) -> None:
            reply.payload = [bytes(frame) for frame in reply.payload]
            answer.append(reply)

        session = self.session
        with self._fleet.lock:
            session.submit(op, batch, payload, done, deadline_s=self._timeout_s, flags=flags, meta=meta)
        until = time.monotonic() + self._timeout_s + 5.0
        while not answer and session.lost is None and time.monotonic() < until:
            self._fleet.poll(0.25)
        if not answer:
            raise EnvFailed(f"{clp.Op(op).name}: {session.lost or 'no answer'}.")
        if answer[0].flags & clp.FAILED:
            raise EnvFailed(f"{session.name} refused: {clp.status_name(answer[0].status)}, {answer[0].text}.")
        return answer[0]


def _row_messages(reply: Message, batch: int) -> dict[int, str]:
    """What the simulator says about rows, as far as there are such rows."""
    said = (reply.meta or {}).get("rows", {})
    if not isinstance(said, dict):
        return {}
    return {row: text for row in range(batch) if isinstance(text := said.get(str(row)), str)}


def _u4(values: Array) -> bytes:
    return np.asarray(values, "<u4").tobytes()


def _u8(values: Array) -> bytes:
    return np.asarray(values).astype("<u8").tobytes()


# Requests about states to several simulators at once: sent to all, then waited for, and put together row by row.


_POLL_S = 0.25
RowIndex = slice | Array


@dataclass(slots=True)
class Part:
    """Rows of a call that go to one simulator in one request."""

    session: SimulatorSession
    rows: RowIndex
    count: int


class Table:
    """What simulators said of the rows of a call."""

    def __init__(self, simulator: Simulator, count: int, *, obs: bool = True):
        leaves = simulator.spec.observation.leaves if obs else ()
        self.reward = np.zeros((count, simulator.hello.players))
        self.flags, self.to_play = np.zeros(count, np.uint8), np.zeros(count, np.int8)
        self.obs = [np.zeros((count, *leaf.shape), leaf.dtype) for leaf in leaves]
        self.failed, self.lost, self.reason = np.zeros(count, np.bool_), np.zeros(count, np.bool_), ""
        """Rows whose step failed, rows whose simulator is gone, and what was said of the last of either."""

    def miss(self, rows: RowIndex, reason: str) -> None:
        """Rows of a simulator that is gone."""
        self.lost[rows], self.reason = True, reason

    def take(self, part: Part, reply: Message, at: int = 0) -> None:
        """The rows of a part, which begin with this frame; those whose step failed are marked."""
        simulator, rows, payload = part.session.simulator, part.rows, reply.payload[at:]
        players = simulator.hello.players
        if reply.batch != part.count or len(payload) != 1 + bool(self.obs):
            raise BadMessage(f"{reply.batch} rows in {len(payload)} frames in answer to {part.count} rows")
        reward, *_, flags, status = (table := simulator.rows.read(payload[0], part.count))[: len(table) - (players > 1)]
        if status.any():
            self.failed[rows] = _which_failed(part, status, reply)
            self.reason = _row_message(part, int(status.nonzero()[0][-1]), status, reply)
        leaves = simulator.observation.read(payload[1], part.count) if self.obs else []
        for leaf in (reward, *leaves):
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                raise BadMessage("numbers that are not finite, in a row that is not E_NOT_FINITE")
        self.reward[rows], self.flags[rows] = reward, flags
        if players > 1:
            self.to_play[rows] = np.minimum(np.maximum(table[-1], 0), players - 1)
        for place, leaf in zip(self.obs, leaves, strict=True):
            place[rows] = leaf


def split(
    homes: Array, sessions: Sequence[SimulatorSession], most: Callable[[SimulatorSession], int]
) -> tuple[list[Part], list[Array]]:
    """Rows by the simulator where they belong, in parts of at most so many; and rows of simulators that are gone."""
    parts, gone = [], []
    first = homes[0]
    alone = bool((homes == first).all())
    for home in [int(first)] if alone else np.unique(homes).tolist():
        rows = np.arange(len(homes)) if alone else np.flatnonzero(homes == home)
        if home < 0 or sessions[home].lost is not None:
            gone.append(rows)
            continue
        each = most(sessions[home])
        for k in range(0, len(rows), each):
            some = rows[k : k + each]
            parts.append(Part(sessions[home], slice(k, k + len(some)) if alone else some, len(some)))
    return parts, gone


def ask(
    fleet: Fleet,
    op: int,
    parts: Sequence[tuple[Part, list[Buffer]]],
    take: Callable[[Part, Message], None],
    timeout_s: float,
    *,
    miss: Callable[[RowIndex, str], None] | None = None,
    flags: int = 0,
    meta: dict[str, Any] | None = None,
) -> None:
    """Ask for all parts at once, and `take` every answer; EnvFailed when a simulator refuses.

    Parts of simulators that are lost meanwhile are `miss`ed, where somebody can do without them; else EnvFailed.
    """
    wrong: list[Exception] = []
    waiting = dict(enumerate(part for part, _ in parts))

    def done(k: int, reply: Message) -> None:
        part = waiting[k]
        try:
            if reply.flags & clp.FAILED:
                status = clp.status_name(reply.status)
                raise EnvFailed(f"{part.session.name} refused {clp.Op(op).name}: {status}, {reply.text}.")
            take(part, reply)
        except (EnvFailed, UserError) as error:
            wrong.append(error)
        del waiting[k]  # not where it was a BadMessage: the fleet gives the simulator up for that, and so it is lost

    with fleet.lock:
        for k, (part, payload) in enumerate(parts):
            part.session.submit(op, part.count, payload, partial(done, k), deadline_s=timeout_s, flags=flags, meta=meta)
    while waiting:  # deadlines of requests end it: a session that does not keep them is lost
        for k, part in list(waiting.items()):
            if part.session.lost is not None:
                if miss is None:
                    raise EnvFailed(f"{clp.Op(op).name}: {part.session.lost}.")
                miss(part.rows, f"{clp.Op(op).name}: {part.session.lost}")
                del waiting[k]
        if waiting:
            fleet.poll(_POLL_S)
    if wrong:
        raise wrong[0]


def _which_failed(part: Part, status: Array, reply: Message) -> Array:
    """Rows whose environment failed; what is wrong with a request or its simulator is raised."""
    failed: Array = (status == clp.Status.E_ENV) | (status == clp.Status.E_NOT_FINITE)
    other = np.flatnonzero((status != 0) & ~failed)
    if not len(other):
        return failed
    row = int(other[0])
    if status[row] == clp.Status.E_SNAPSHOT_FULL:
        raise UserError(
            f"{part.session.name} keeps as many states as it may ({_said(row, reply)}): search with fewer simulations "
            "or trees, run more simulators, or let each keep more with env_kwargs snapshot_mb."
        )
    raise EnvFailed(_row_message(part, row, status, reply) + ".")


def _row_message(part: Part, row: int, status: Array, reply: Message) -> str:
    return f"{part.session.name}: {clp.status_name(int(status[row]))} {_said(row, reply)}".rstrip()


def _said(row: int, reply: Message) -> str:
    said = (reply.meta or {}).get("rows", {})
    return str(said.get(str(row), "")) if isinstance(said, dict) else ""
