"""States of environments inside a simulator, from the learner's side: save, load, expand, drop, export, import.

Ids are chosen here, a generation and a counter, so a whole tree is dropped by its generation. Every call is answered
before it returns, or raises; rows that could not be served have a status.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from corral.core.encoding import Buffer
from corral.core.errors import EnvFailed, UserError
from corral.core.types import Array, Tree
from corral.link import protocol as clp
from corral.link.client.fleet import Fleet
from corral.link.client.session import Session
from corral.link.message import BadMessage, Message

_MOST_STEPS = 1 << 16


@dataclass
class Rows:
    """What came of each row. Observations are None where none were asked for."""

    reward: Array  # [B, players] float64
    terminated: Array  # [B] bool
    truncated: Array  # [B] bool
    faulty: Array  # [B] bool
    status: Array  # [B] uint16, 0 is good
    to_play: Array  # [B] int8
    obs: Tree | None
    words: dict[int, str]

    def require_good(self, what: str) -> None:
        """EnvFailed, naming the first row that went wrong and why."""
        bad = np.flatnonzero(self.status)
        if len(bad):
            row = int(bad[0])
            name = clp.status_name(int(self.status[row]))
            raise EnvFailed(f"{what}: row {row} of {len(self.status)}: {name} {self.words.get(row, '')}".rstrip())


class States:
    """The states of one session. `slots` are places of environments in it, beside those that VecEnvs have."""

    def __init__(self, fleet: Fleet, session: Session, timeout_s: float = 60.0):
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

    def reset(self, slots: Array, seeds: Array) -> Rows:
        """Start episodes."""
        return self._rows(clp.Op.RESET, [_u4(slots), _u8(seeds)], len(slots))

    def step(self, slots: Array, actions: Tree, *, autoreset: bool = False) -> Rows:
        """Step slots; where an episode ends, it stays there unless `autoreset`."""
        flags = clp.AUTORESET if autoreset else 0
        return self._rows(clp.Op.STEP, [_u4(slots), self._actions(actions, len(slots))], len(slots), flags=flags)

    def save(self, slots: Array, ids: Array | None = None) -> tuple[Array, Rows]:
        """Keep the states of slots; returns their ids."""
        ids = self.new_ids(len(slots)) if ids is None else ids
        return ids, self._rows(clp.Op.SAVE, [_u4(slots), _u8(ids)], len(slots), obs=False)

    def load(self, slots: Array, ids: Array) -> Rows:
        """Put slots where their states were; observations as they were then."""
        return self._rows(clp.Op.LOAD, [_u4(slots), _u8(ids)], len(slots), flags=clp.WANT_OBS)

    def expand(
        self, parents: Array, actions: Tree, children: Array | None = None, seeds: Array | None = None
    ) -> tuple[Array, Rows]:
        """Step from states, keep what comes out; returns the children's ids. Rows do not depend on each other."""
        children = self.new_ids(len(parents)) if children is None else children
        payload = [_u8(parents), self._actions(actions, len(parents)), _u8(children)]
        if seeds is not None:
            payload.append(_u8(seeds))
        return children, self._rows(clp.Op.EXPAND, payload, len(parents))

    def rollout(self, parents: Array, actions: Tree, steps: int) -> tuple[Array, Array, Rows]:
        """Step from states, `steps` actions each ([B * steps, ...]); rewards [B, steps], lengths [B], last rows."""
        if not 1 <= steps <= _MOST_STEPS:
            raise UserError(f"A rollout has 1 to {_MOST_STEPS} steps, got {steps}.")
        batch = len(parents)
        payload = [_u8(parents), self._actions(actions, batch * steps)]
        reply = self._ask(clp.Op.ROLLOUT, payload, batch, meta={"steps": steps})
        if len(reply.payload) != 4 or len(reply.payload[0]) != 8 * batch * steps or len(reply.payload[1]) != 4 * batch:
            raise EnvFailed(f"{self.session.name} answered a rollout with frames that do not fit.")
        rewards = np.frombuffer(reply.payload[0], "<f8").reshape(batch, steps).copy()
        lengths = np.frombuffer(reply.payload[1], "<u4").copy()
        return rewards, lengths, self._read(reply, reply.payload[2:], batch)

    def export(self, ids: Array) -> tuple[list[bytes], Rows]:
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

    def take_in(self, blobs: Sequence[bytes], ids: Array | None = None) -> tuple[Array, Rows]:
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

    def _rows(self, op: int, payload: list[Buffer], batch: int, *, flags: int = 0, obs: bool = True) -> Rows:
        reply = self._ask(op, payload, batch, flags)
        return self._read(reply, reply.payload if obs else reply.payload[:1], batch)

    def _read(self, reply: Message, payload: Sequence[Buffer], batch: int) -> Rows:
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
        return Rows(
            table[0].copy(),
            (flags & clp.TERMINATED) != 0,
            (flags & clp.TRUNCATED) != 0,
            (flags & clp.FAULTY) != 0,
            status,
            to_play,
            None if leaves is None else simulator.spec.observation.unflatten(leaves),
            _words(reply, batch),
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
        session.submit(op, batch, payload, done, deadline_s=self._timeout_s, flags=flags, meta=meta)
        until = time.monotonic() + self._timeout_s + 5.0
        while not answer and session.lost is None and time.monotonic() < until:
            self._fleet.poll(0.25)
        if not answer:
            raise EnvFailed(f"{clp.Op(op).name}: {session.lost or 'no answer'}.")
        if answer[0].flags & clp.FAILED:
            raise EnvFailed(f"{session.name} refused: {clp.status_name(answer[0].status)}, {answer[0].text}.")
        return answer[0]


def _words(reply: Message, batch: int) -> dict[int, str]:
    """What the simulator says about rows, as far as there are such rows."""
    said = (reply.meta or {}).get("rows", {})
    if not isinstance(said, dict):
        return {}
    return {row: text for row in range(batch) if isinstance(text := said.get(str(row)), str)}


def _u4(values: Array) -> bytes:
    return np.asarray(values, "<u4").tobytes()


def _u8(values: Array) -> bytes:
    return np.asarray(values).astype("<u8").tobytes()
