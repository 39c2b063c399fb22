"""Requests about the states of environments inside simulators: SAVE, LOAD, EXPAND, ROLLOUT, EXPORT, IMPORT, DROP.

`ask` sends one call to several simulators at once and waits for all of them; `StateReplies` merges their rows.
`StateClient` makes the requests of a single simulator, with its own slots.
"""

from __future__ import annotations

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
from corral.link.message import BadMessage, Message, printable

_POLL_S = 0.25
RowIndex = slice | Array


@dataclass(slots=True)
class RowChunk:
    """A chunk of a batched call: the rows sent to one simulator in one request."""

    session: SimulatorSession
    rows: RowIndex
    count: int


class StateReplies:
    """The rows of a call as the simulators answered them; rows that could not be served have a status."""

    def __init__(self, simulator: Simulator, count: int, *, obs: bool = True):
        self._layout = simulator.spec.observation
        leaves = self._layout.leaves if obs else ()
        self.reward = np.zeros((count, simulator.hello.players))
        self.flags, self.to_play = np.zeros(count, np.uint8), np.zeros(count, np.int8)
        self.status = np.zeros(count, np.uint16)
        self.leaves = [np.zeros((count, *leaf.shape), leaf.dtype) for leaf in leaves]
        self.failed, self.lost = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        """Rows whose step failed (see `take_steps`), and rows whose simulator disconnected."""
        self.messages: dict[int, str] = {}
        self.message = ""  # the message of the last failed or lost row

    @property
    def terminated(self) -> Array:
        return self._has(clp.TERMINATED)

    @property
    def truncated(self) -> Array:
        return self._has(clp.TRUNCATED)

    @property
    def obs(self) -> Tree | None:
        return self._layout.unflatten(self.leaves) if self.leaves else None

    def outcomes(self) -> list[bytes]:
        """Everything that each row shows, to compare steps."""
        columns: list[Array] = [self.reward, self.flags, self.to_play, *self.leaves]
        return [b"".join(column[row].tobytes() for column in columns) for row in range(len(self.flags))]

    def require_good(self, what: str) -> None:
        bad = np.flatnonzero(self.status)
        if len(bad):
            row = int(bad[0])
            name = clp.status_name(int(self.status[row]))
            raise EnvFailed(f"{what}: row {row} of {len(self.status)}: {name} {self.messages.get(row, '')}".rstrip())

    def miss(self, rows: RowIndex, message: str) -> None:
        self.lost[rows], self.message = True, message

    def take(self, chunk: RowChunk, reply: Message, at: int = 0) -> Array:
        """Read the rows of a chunk, starting at this frame; returns their status."""
        simulator, rows, payload = chunk.session.simulator, chunk.rows, reply.payload[at:]
        players = simulator.hello.players
        if reply.batch != chunk.count or len(payload) != 1 + bool(self.leaves):
            raise BadMessage(f"{reply.batch} rows in {len(payload)} frames in answer to {chunk.count} rows")
        reward, *other = simulator.rows.read(payload[0], chunk.count)
        to_play = other.pop() if players > 1 else None
        *_, flags, status = other
        leaves = simulator.observation.read(payload[1], chunk.count) if self.leaves else []
        self.reward[rows], self.flags[rows], self.status[rows] = reward, flags, status
        if to_play is not None:
            self.to_play[rows] = np.minimum(np.maximum(to_play, 0), players - 1)
        for place, leaf in zip(self.leaves, leaves, strict=True):
            place[rows] = leaf
        if reply.meta:
            numbers = np.arange(len(self.status))[rows].tolist()
            self.messages |= {numbers[row]: text for row, text in row_messages(reply, chunk.count).items()}
        return status

    def take_steps(self, chunk: RowChunk, reply: Message, at: int = 0) -> None:
        """`take` for a planner: rows whose environment failed are marked, any other status is raised."""
        status = self.take(chunk, reply, at)
        if status.any():
            self.failed[chunk.rows] = _failed_steps(chunk, status, reply)
            self.message = _row_message(chunk, int(status.nonzero()[0][-1]), status, reply)
        for leaf in (self.reward, *self.leaves):
            if leaf.dtype.kind == "f" and not np.isfinite(leaf[chunk.rows]).all():
                raise BadMessage("numbers that are not finite, in a row that is not E_NOT_FINITE")
        seen = [leaf[chunk.rows] for leaf in self.leaves]
        outside = self._layout.outside(seen) if seen else None
        if outside is not None and (outside := outside & (status == 0)).any():
            self.failed[chunk.rows] |= outside
            row = int(outside.nonzero()[0][-1])
            self.message = f"{chunk.session.name}: {self._layout.range_problem([leaf[row] for leaf in seen])}"

    def _has(self, flag: int) -> Array:
        found: Array = (self.flags & flag) != 0
        return found


def split(
    homes: Array, sessions: Sequence[SimulatorSession], max_rows: Callable[[SimulatorSession], int]
) -> tuple[list[RowChunk], list[Array]]:
    """Rows by simulator, in chunks of at most `max_rows`; and the rows of simulators that disconnected."""
    chunks, gone = [], []
    first = homes[0]
    alone = bool((homes == first).all())
    for home in [int(first)] if alone else np.unique(homes).tolist():
        rows = np.arange(len(homes)) if alone else np.flatnonzero(homes == home)
        if home < 0 or sessions[home].lost is not None:
            gone.append(rows)
            continue
        each = max_rows(sessions[home])
        for k in range(0, len(rows), each):
            some = rows[k : k + each]
            chunks.append(RowChunk(sessions[home], slice(k, k + len(some)) if alone else some, len(some)))
    return chunks, gone


def ask(
    fleet: Fleet,
    op: int,
    chunks: Sequence[tuple[RowChunk, list[Buffer]]],
    take: Callable[[RowChunk, Message], Any],
    timeout_s: float,
    *,
    miss: Callable[[RowIndex, str], None] | None = None,
    flags: int = 0,
    meta: dict[str, Any] | None = None,
) -> None:
    """Send all chunks and `take` every reply; EnvFailed if a simulator refuses or, without `miss`, disconnects."""
    errors: list[Exception] = []
    waiting = dict(enumerate(chunk for chunk, _ in chunks))

    def done(k: int, reply: Message) -> None:
        chunk = waiting[k]
        try:
            if reply.flags & clp.FAILED:
                status = clp.status_name(reply.status)
                raise EnvFailed(f"{chunk.session.name} refused {clp.Op(op).name}: {status}, {reply.text}.")
            take(chunk, reply)
        except (EnvFailed, UserError) as error:
            errors.append(error)
        del waiting[k]  # after a BadMessage it stays: the fleet disconnects the simulator, which loses the chunk

    with fleet.lock:
        for k, (chunk, payload) in enumerate(chunks):
            chunk.session.submit(
                op, chunk.count, payload, partial(done, k), deadline_s=timeout_s, flags=flags, meta=meta
            )
    while waiting:  # this ends: a session that misses a deadline is disconnected
        for k, chunk in list(waiting.items()):
            if chunk.session.lost is not None:
                if miss is None:
                    raise EnvFailed(f"{clp.Op(op).name}: {chunk.session.lost}.")
                miss(chunk.rows, f"{clp.Op(op).name}: {chunk.session.lost}")
                del waiting[k]
        if waiting:
            fleet.poll(_POLL_S)
    if errors:
        raise errors[0]


class StateClient:
    """Requests to one simulator about states, and about slots that no VecEnv uses.

    Ids consist of a generation and a counter, so a whole tree is dropped by its generation. Every call returns with its
    reply or raises EnvFailed.
    """

    def __init__(self, fleet: Fleet, session: SimulatorSession, timeout_s: float = 60.0):
        self._fleet, self.session, self._timeout_s = fleet, session, timeout_s
        self._generation, self._counter = session.take_generation(), 0

    @property
    def level(self) -> int:
        """As `snapshot.states.Level`."""
        return self.session.simulator.hello.level

    def new_ids(self, count: int) -> Array:
        first = self._generation << clp.GENERATION_BITS | self._counter + 1
        self._counter += count
        return np.arange(first, first + count, dtype="<u8")

    def next_generation(self) -> None:
        """Drop all states and continue with ids of another generation."""
        self.session.send_one_way(clp.Op.DROP, meta={"generation": self._generation})
        self._generation, self._counter = self.session.take_generation(), 0

    def drop(self, ids: Array) -> None:
        self.session.send_one_way(clp.Op.DROP, [u8(ids)], len(ids))

    def take_slots(self, count: int) -> Array:
        return np.array([self.session.take_slot() for _ in range(count)], "<u4")

    def reset(self, slots: Array, seeds: Array) -> StateReplies:
        return self._rows(clp.Op.RESET, [_u4(slots), u8(seeds)], len(slots))

    def step(self, slots: Array, actions: Tree, *, autoreset: bool = False) -> StateReplies:
        """Step slots; without `autoreset`, an ended episode stays at its end."""
        flags = clp.AUTORESET if autoreset else 0
        return self._rows(clp.Op.STEP, [_u4(slots), self._actions(actions, len(slots))], len(slots), flags=flags)

    def save(self, slots: Array, ids: Array | None = None) -> tuple[Array, StateReplies]:
        ids = self.new_ids(len(slots)) if ids is None else ids
        return ids, self._rows(clp.Op.SAVE, [_u4(slots), u8(ids)], len(slots), obs=False)

    def load(self, slots: Array, ids: Array) -> StateReplies:
        return self._rows(clp.Op.LOAD, [_u4(slots), u8(ids)], len(slots), flags=clp.WANT_OBS)

    def expand(self, parents: Array, actions: Tree, seeds: Array | None = None) -> tuple[Array, StateReplies]:
        children = self.new_ids(len(parents))
        payload = [u8(parents), self._actions(actions, len(parents)), u8(children)]
        payload += [] if seeds is None else [u8(seeds)]
        return children, self._rows(clp.Op.EXPAND, payload, len(parents))

    def export(self, ids: Array) -> tuple[list[bytes], StateReplies]:
        blobs: list[bytes] = []
        replies = StateReplies(self.session.simulator, len(ids), obs=False)

        def take(chunk: RowChunk, reply: Message) -> None:
            if len(reply.payload) != 3 or len(reply.payload[1]) != 8 * chunk.count:
                raise EnvFailed(f"{self.session.name} answered an export with frames that do not fit.")
            sizes, at = np.frombuffer(reply.payload[1], "<u8").tolist(), 0
            if sum(sizes) != len(reply.payload[2]):
                raise EnvFailed(f"{self.session.name} answered an export with sizes that are not those of the states.")
            for size in sizes:
                blobs.append(bytes(reply.payload[2][at : at + size]))
                at += size
            reply.payload = reply.payload[:1]
            replies.take(chunk, reply)

        self._ask(clp.Op.EXPORT, [u8(ids)], len(ids), take)
        return blobs, replies

    def import_states(self, blobs: Sequence[bytes]) -> tuple[Array, StateReplies]:
        ids, sizes = self.new_ids(len(blobs)), np.array([len(blob) for blob in blobs])
        return ids, self._rows(clp.Op.IMPORT, [u8(ids), u8(sizes), b"".join(blobs)], len(blobs), obs=False)

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._ask(clp.Op.STATS, [], 0, lambda chunk, reply: found.update(reply.meta or {}))
        return found

    def _actions(self, actions: Tree, count: int) -> Buffer:
        layout = self.session.simulator.spec.action
        return self.session.simulator.action.write(layout.batch(actions, count), count)

    def _rows(self, op: int, payload: list[Buffer], batch: int, *, flags: int = 0, obs: bool = True) -> StateReplies:
        replies = StateReplies(self.session.simulator, batch, obs=obs)

        def take(chunk: RowChunk, reply: Message) -> None:
            reply.payload = reply.payload[: 1 + obs]  # RESET and STEP may add final observations
            replies.take(chunk, reply)

        self._ask(op, payload, batch, take, flags)
        return replies

    def _ask(
        self, op: int, payload: list[Buffer], batch: int, take: Callable[[RowChunk, Message], Any], flags: int = 0
    ) -> None:
        if self.session.lost is not None:
            raise EnvFailed(f"{clp.Op(op).name}: {self.session.lost}.")
        chunk = RowChunk(self.session, slice(None), batch)
        ask(self._fleet, op, [(chunk, payload)], take, self._timeout_s, flags=flags)


def read_rollout(reply: Message, batch: int, steps: int) -> tuple[Array, Array]:
    """Rewards [batch, steps] and lengths [batch] of a reply to ROLLOUT."""
    if len(reply.payload) < 2 or len(reply.payload[0]) != 8 * batch * steps or len(reply.payload[1]) != 4 * batch:
        raise BadMessage("an answer to a rollout whose frames do not fit")
    rewards = np.frombuffer(reply.payload[0], "<f8").reshape(batch, steps)
    return rewards, np.frombuffer(reply.payload[1], "<u4")


def row_messages(reply: Message, batch: int) -> dict[int, str]:
    """The simulator's messages about rows; those about unknown rows are ignored."""
    given = (reply.meta or {}).get("rows", {})
    if not isinstance(given, dict):
        return {}
    texts = {row: given.get(str(row)) for row in range(batch)}
    return {row: printable(text, lines=True) for row, text in texts.items() if isinstance(text, str)}


def _failed_steps(chunk: RowChunk, status: Array, reply: Message) -> Array:
    """Rows whose environment failed; raises where the request or the simulator is at fault."""
    failed: Array = (status == clp.Status.E_ENV) | (status == clp.Status.E_NOT_FINITE)
    other = np.flatnonzero((status != 0) & ~failed)
    if not len(other):
        return failed
    row = int(other[0])
    if status[row] == clp.Status.E_SNAPSHOT_FULL:
        raise UserError(
            f"{chunk.session.name} has no room for more states ({row_messages(reply, chunk.count).get(row, '')}): "
            "search with fewer simulations or trees, run more simulators, or give each more memory with "
            "env_kwargs snapshot_mb."
        )
    raise EnvFailed(_row_message(chunk, row, status, reply) + ".")


def _row_message(chunk: RowChunk, row: int, status: Array, reply: Message) -> str:
    text = row_messages(reply, chunk.count).get(row, "")
    return f"{chunk.session.name}: {clp.status_name(int(status[row]))} {text}".rstrip()


def _u4(values: Array) -> bytes:
    return np.asarray(values, "<u4").tobytes()


def u8(values: Array) -> bytes:
    """Ids or seeds in wire format."""
    return np.asarray(values).astype("<u8").tobytes()
