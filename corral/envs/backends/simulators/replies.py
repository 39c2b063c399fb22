"""Replies of simulators to RESET and STEP, and how they are written to the rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from corral.core.encoding import Buffer
from corral.core.spaces import Layout
from corral.core.types import Array
from corral.envs.stepping.id_set import IdSet, SetCache
from corral.envs.stepping.rows import FAULTY, FIRST, GAME_OVER, TERMINATED, TRUNCATED, EnvRows
from corral.link import protocol as clp
from corral.link.client.session import Simulator
from corral.link.client.states import row_messages
from corral.link.message import BadMessage, Message


class StepReply:
    """A reply to RESET or STEP, as arrays that are views of it."""

    __slots__ = ("_outside", "_reply", "ended", "final", "flags", "obs", "raw_reward", "reward", "status", "to_play")

    def __init__(self, simulator: Simulator, batch: int, reply: Message):
        table = simulator.rows.read(reply.payload[0], batch)
        self.obs = simulator.observation.read(reply.payload[1], batch)
        self.to_play = table.pop() if simulator.hello.players > 1 else None
        self.status, self.flags = table.pop(), table.pop()
        self.reward, self.raw_reward = table[0], table[-1]
        self.final: list[Array] | None = None
        self.ended: Any = None
        self._reply = reply
        self._outside: dict[int, str] = {}

    def read_final(self, simulator: Simulator, payload: Sequence[Buffer]) -> None:
        """Final observations of episodes that were followed by others; BadMessage when flags and frames disagree."""
        flags = self.flags
        self.ended = (flags & (clp.FIRST | clp.FAULTY)) == clp.FIRST
        over = (flags & (clp.TERMINATED | clp.TRUNCATED)) != 0
        if np.any(over & ((flags & (clp.FIRST | clp.FAULTY)) == 0)) or np.any(~over & ((flags & clp.FIRST) != 0)):
            raise BadMessage("rows that end an episode without FIRST, or have FIRST without ending one")
        count = int(np.count_nonzero(self.ended))
        if bool(count) != (len(payload) == 3):
            raise BadMessage(f"{count} ended episodes and {len(payload)} frames")
        if count:
            self.final = simulator.observation.read(payload[2], count)

    def check_status(self, *, reset: bool) -> None:
        """BadMessage when the rows with a status and the faulty rows differ."""
        flags, failed = self.flags, self.status != 0
        faulty = (flags & clp.FAULTY) != 0
        if np.any(faulty & ~failed):
            raise BadMessage("faulty rows without a status")
        excused = faulty if reset else faulty | ((flags & clp.FIRST) != 0)  # step: its end is valid
        if np.any(failed & ~excused):
            raise BadMessage(f"{clp.status_name(int(self.status[failed][0]))} in a row that is not faulty")

    def check_finite(self) -> None:
        """BadMessage for numbers that are not finite in rows that are not marked as failed."""
        good = (self.flags & clp.FAULTY) == 0
        here = good | ((self.flags & clp.FIRST) != 0)
        values = [self.reward[good], self.raw_reward[good], *(leaf[here] for leaf in self.obs), *(self.final or ())]
        if not all(np.isfinite(value).all() for value in values if value.dtype.kind == "f"):
            raise BadMessage("numbers that are not finite, in a row that is not E_NOT_FINITE")

    def fail_outside(self, layout: Layout) -> None:
        """Turn rows with a discrete value outside its space, which networks cannot take, into faulty rows."""
        here, last = layout.outside(self.obs), None if self.final is None else layout.outside(self.final)
        if here is None and last is None:
            return
        ended = np.zeros(len(self.flags), np.bool_) if self.ended is None else self.ended
        bad = np.zeros_like(ended) if here is None else here & ((self.flags & (clp.FAULTY | clp.FIRST)) != clp.FAULTY)
        for row in bad.nonzero()[0].tolist():
            self._outside[row] = layout.range_problem([leaf[row] for leaf in self.obs]) or ""
        for k in () if last is None else last.nonzero()[0].tolist():
            row = int(ended.nonzero()[0][k])
            bad[row], self._outside[row] = True, layout.range_problem([leaf[k] for leaf in self.final or ()]) or ""
        if self.final is not None:
            self.final = [leaf[~bad[ended]] for leaf in self.final]
        self.ended, self.flags, self.status = ended & ~bad, self.flags.copy(), self.status.copy()
        self.flags[bad], self.status[bad] = clp.FAULTY | clp.TRUNCATED, clp.Status.E_ENV

    def kind(self, row: int) -> str:
        """The kind of a row's fault."""
        if row in self._outside:
            return "range"
        return "nan" if self.status[row] == clp.Status.E_NOT_FINITE else "raised"

    def write(self, rows: EnvRows, chosen: IdSet, to_play: Array) -> None:
        """Write observations and rewards to the rows; updates `to_play`, the player to move."""
        index, half = chosen.index, rows.half(chosen)
        for leaf, value in zip(rows.obs, self.obs, strict=True):
            if half is None:
                leaf[rows.phase[chosen.ids], chosen.ids] = value
            else:
                leaf[half][index] = value
        if self.to_play is None:
            rows.reward[index], rows.raw_reward[index] = self.reward[:, 0], self.raw_reward[:, 0]
        else:  # rewards of the player that moved
            mover = np.clip(to_play[chosen.ids], 0, self.reward.shape[1] - 1)
            each = np.arange(len(chosen))
            rows.reward[index], rows.raw_reward[index] = self.reward[each, mover], self.raw_reward[each, mover]
            to_play[chosen.ids] = self.to_play

    def write_flags(self, rows: EnvRows, ids: Array) -> None:
        flags = self.flags
        over = (flags & (clp.TERMINATED | clp.TRUNCATED)) != 0
        for place, value in (
            (TERMINATED, (flags & clp.TERMINATED) != 0),
            (TRUNCATED, (flags & clp.TRUNCATED) != 0),
            (FAULTY, (flags & clp.FAULTY) != 0),
            (FIRST, (flags & clp.FIRST) != 0),
            (GAME_OVER, over & ((flags & clp.LIFE) == 0)),
        ):
            rows.flags[ids, place] = value

    def text(self, row: int) -> str:
        return self._outside.get(row) or row_messages(self._reply, len(self.flags)).get(row, "")


def read_answer(simulator: Simulator, batch: int, reply: Message) -> StepReply:
    """Read a reply to RESET or STEP; BadMessage when it does not fit."""
    if reply.flags & clp.FAILED:
        raise BadMessage(f"{clp.status_name(reply.status)} in answer to a good request: {reply.text}")
    payload = reply.payload
    if reply.batch != batch or not 2 <= len(payload) <= 3:
        raise BadMessage(f"{reply.batch} rows in {len(payload)} frames in answer to {batch} rows")
    answer = StepReply(simulator, batch, reply)
    answer.check_status(reset=reply.op == clp.Op.RESET)
    if reply.op == clp.Op.STEP and (len(payload) == 3 or np.count_nonzero(answer.flags)):
        answer.read_final(simulator, payload)
    answer.check_finite()
    answer.fail_outside(simulator.spec.observation)
    return answer


class ReplyRows:
    """Consecutive rows and a buffer for a reply to their STEP: views are made once, because making them is slow."""

    def __init__(self, rows: EnvRows, chosen: IdSet, simulator: Simulator):
        index, batch = chosen.index, len(chosen)
        self._obs = [[_bytes_of(leaf[half][index]) for leaf in rows.obs] for half in (0, 1)]
        self._floats = [
            [leaf[half][index].reshape(-1) for leaf in rows.obs if leaf.dtype.kind == "f"] for half in (0, 1)
        ]
        discrete = rows.spec.observation.discrete
        self._discrete = [[(leaf, rows.obs[k][half][index]) for k, leaf in discrete] for half in (0, 1)]
        self._leaves, self._obs_size = simulator.observation.spans(batch)
        spans, size = simulator.rows.spans(batch)
        *rewards, (self._flags_at, _), _ = spans
        self._room = bytearray(size)
        self._all_rewards = np.frombuffer(self._room, np.float64, self._flags_at // 8)
        self._rewards = np.ndarray((batch, 2), np.float64, self._room, 0, (8, rewards[-1][0]))  # reward, raw reward
        self._table, self._flags_as_int = rows.table[index, :2], rows.table.view(np.int64)[index, 2]
        self.step, self.late = rows.step[index], 0
        """Steps of the episodes, and how many have yet to be added: deferred, because each addition is costly."""

    def take(self, half: int, payload: Sequence[Buffer]) -> bool:
        """Write a reply to the rows; False unless it has no flags and all values are finite and in their space."""
        room = self._room
        if len(payload) != 2 or len(payload[0]) != len(room) or len(payload[1]) != self._obs_size:
            return False
        room[:] = payload[0]
        if room.count(0, self._flags_at) != len(room) - self._flags_at or not _finite(self._all_rewards):
            return False
        if len(self._leaves) == 1:
            self._obs[half][0][:] = payload[1]
        else:
            for room_of, (start, end) in zip(self._obs[half], self._leaves, strict=True):
                room_of[:] = payload[1][start:end]
        for values in self._floats[half]:
            if not _finite(values):
                return False
        for leaf, values in self._discrete[half]:
            if not leaf.in_range(values):
                return False
        self._table[...] = self._rewards
        self._flags_as_int.fill(0)
        return True


class QuickSteps:
    """Handles replies to STEP that end no episode, as most do, in as few operations as possible."""

    def __init__(self, rows: EnvRows):
        self._rows = rows
        self._places = SetCache[ReplyRows | None](rows.num_envs)  # None: rows that need the slow path
        self._uncounted: list[ReplyRows] = []

    def take(self, simulator: Simulator, chosen: IdSet, reply: Message) -> bool:
        """Write a reply to the rows; False if it needs the slow path."""
        try:
            place = self._places[chosen]
        except KeyError:  # all simulators have the same layout
            index = chosen.index
            follow = simulator.hello.players == 1 and isinstance(index, slice) and index.step in (None, 1)
            place = self._places[chosen] = ReplyRows(self._rows, chosen, simulator) if follow else None
        half = self._rows.half(chosen)
        if place is None or half is None or reply.flags != clp.REPLY or reply.batch != len(chosen.numbers):
            return False
        if not place.take(half, reply.payload):
            return False
        if not place.late:
            self._uncounted.append(place)
        place.late += 1
        return True

    def count_steps(self) -> None:
        """Add the deferred steps, before they are read or reset."""
        for place in self._uncounted:
            place.step += place.late
            place.late = 0
        self._uncounted.clear()


def _finite(values: Array) -> bool:
    """Whether all values are finite; checks the sum of squares first, which is far faster."""
    return isfinite(np.vdot(values, values)) or bool(np.isfinite(values).all())  # `dot` would warn of an overflow


def _bytes_of(leaf: Any) -> memoryview:
    return memoryview(leaf.reshape(-1).view(np.uint8))
