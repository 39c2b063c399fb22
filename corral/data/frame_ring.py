"""Ring buffers of observations, each stored once; of stacked images, each frame once.

Positions in the rings are counters that only grow: counter `c` is in slot `c % size` and is valid until `c + size` is
written. A counter alone therefore tells whether its data still exists.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from corral.core.spaces import Leaf
from corral.core.types import Array, EnvSpec, Trajectory, Tree

_SMALL = 256  # bytes


def ring_size(capacity: int, item_bytes: int, margin: int) -> int:
    """Slots for the observations of `capacity` transitions.

    An episode has one more observation than transitions, so one-step episodes need twice as many slots. Small items get
    that; only faulty rows, which have observations but no transitions, can then exceed it. Large items get 3 % more: if
    the mean episode is shorter than 32 steps, fewer than `capacity` transitions are kept.
    """
    return (2 * capacity if item_bytes <= _SMALL else capacity + capacity // 32) + margin


def write_ring(ring: Array, counter: int, rows: Array) -> None:
    """Write rows to consecutive slots from a counter on, with wrap-around; at most one ring's length."""
    start = counter % len(ring)
    fits = min(len(rows), len(ring) - start)
    ring[start : start + fits] = rows[:fits]
    if fits < len(rows):
        ring[: len(rows) - fits] = rows[fits:]


def is_stack(leaf: Leaf) -> bool:
    """Whether a leaf looks like a stack of the last `k` frames, newest last."""
    shape = leaf.shape
    return leaf.dtype == np.uint8 and len(shape) == 3 and 2 <= shape[0] <= 8 and min(shape[1:]) >= 16


class FrameRing:
    """Single frames; a stack is `k` ascending counters of frames."""

    def __init__(self, leaf: Leaf, size: int):
        self.depth = leaf.shape[0]
        self.size, self.high = size, 0
        self.frames = np.zeros((size, *leaf.shape[1:]), leaf.dtype)  # zeros take no memory until they are written

    def push(self, stacks: Array, before: Array | None, before_at: Array) -> Array:
        """Store stacks [m, k, H, W] and return their counters [m, k].

        `before` are the previous stacks of the same environments, and `before_at` their counters. If a stack moved on
        by one frame, only that frame is new; otherwise (after a reset, or if it is no stack) all its frames are stored,
        equal neighbours once.
        """
        moved_on = np.zeros(len(stacks), np.bool_)
        if before is not None:
            moved_on = (stacks[:, :-1] == before[:, 1:]).all((1, 2, 3))
        fresh = np.zeros((len(stacks), self.depth), np.bool_)
        fresh[moved_on, -1] = True
        if not moved_on.all():
            whole = stacks[~moved_on]
            fresh[~moved_on, 0] = True
            fresh[~moved_on, 1:] = (whole[:, 1:] != whole[:, :-1]).any((2, 3))
        counters = self.high - 1 + np.cumsum(fresh).reshape(fresh.shape)
        counters[moved_on, :-1] = before_at[moved_on, 1:]
        new = stacks[fresh]
        write_ring(self.frames, self.high, new)
        self.high += len(new)
        return counters

    def take(self, counters: Array) -> Array:
        return self.frames.take(counters % self.size, axis=0)


class Observations:
    """The observations of many environments, stored and retrieved by number.

    `clocks`: the newest counter of each ring. An observation is stored while its `needs` are at least `alive_from`.
    """

    def __init__(self, spec: EnvSpec, capacity: int, num_envs: int, margin: int):
        self._layout, self._last = spec.observation, np.full(num_envs, -1, np.int64)
        leaves = self._layout.leaves
        stacks = {i: leaf for i, leaf in enumerate(leaves) if is_stack(leaf)}
        plain = {i: leaf for i, leaf in enumerate(leaves) if i not in stacks}
        largest = max((int(np.prod(x.shape, dtype=np.int64)) * x.dtype.itemsize for x in plain.values()), default=0)
        self.size, self.high = ring_size(capacity, largest, margin), 0
        self._plain = {i: np.zeros((self.size, *leaf.shape), leaf.dtype) for i, leaf in plain.items()}
        self._frames = {
            i: FrameRing(leaf, ring_size(capacity, int(np.prod(leaf.shape[1:])), margin * leaf.shape[0]))
            for i, leaf in stacks.items()
        }
        self._stacks = {i: np.zeros((self.size, leaf.shape[0]), np.int64) for i, leaf in stacks.items()}
        self.sizes = np.array([self.size, *(ring.size for ring in self._frames.values())])
        """Sizes of all rings, that of the observations first."""

    @property
    def clocks(self) -> Array:
        return np.array([self.high, *(ring.high for ring in self._frames.values())])

    @property
    def alive_from(self) -> Array:
        alive: Array = self.clocks - self.sizes
        return alive

    @property
    def nbytes(self) -> int:
        arrays = [*self._plain.values(), *self._stacks.values(), *(ring.frames for ring in self._frames.values())]
        return sum(array.nbytes for array in arrays) + self._last.nbytes

    def needs(self, numbers: Array) -> Array:
        """Oldest counter in each ring that these observations refer to, [m, rings]."""
        oldest = np.empty((len(numbers), len(self.sizes)), np.int64)
        oldest[:, 0] = numbers
        for column, table in enumerate(self._stacks.values(), 1):
            oldest[:, column] = table[numbers % self.size, 0]
        return oldest

    def is_recent(self, needs: Array) -> Array:
        """Which of these needs [m, rings] remain valid for at least half a ring's length."""
        if not self._frames:
            alone: Array = needs[:, 0] > self.high - self.size // 2
            return alone
        recent: Array = (needs > self.clocks - self.sizes // 2).all(1)
        return recent

    def take(self, numbers: Array) -> Tree:
        return self._layout.unflatten(self._leaves(numbers))

    def _leaves(self, numbers: Array) -> list[Array]:
        slots = numbers % self.size
        leaves = []
        for i in range(len(self._layout.leaves)):
            ring = self._frames.get(i)
            rows = (self._plain if ring is None else self._stacks)[i].take(slots, axis=0)
            leaves.append(rows if ring is None else ring.take(rows))
        return leaves

    def add(self, traj: Trajectory) -> tuple[Array, Array, Array]:
        """Store a fragment.

        Returns the numbers of its observations [T + 1, B], of the true successors of its rows [T, B], and which
        environments [B] continue from their last fragment. Final observations of faulty rows are not stored, since no
        transition uses them.
        """
        length, width = traj.shape
        obs, final = self._layout.flatten(traj.obs), self._layout.flatten(traj.final_obs)
        final_at = traj.final_at
        if traj.faulty.any():
            kept = ~traj.faulty[final_at[:, 0], final_at[:, 1]]
            final_at, final = final_at[kept], [leaf[kept] for leaf in final]
        continues = self._continues(traj.env_id, [leaf[0] for leaf in obs])

        numbers = np.empty((length + 1, width), np.int64)
        numbers[0] = self._last[traj.env_id]
        new = (~continues).nonzero()[0]
        numbers[0, new] = self._count(len(new))
        start = self.high
        numbers[1:] = self._count(length * width).reshape(length, width)
        final_numbers = self._count(len(final_at))
        for i, leaf in enumerate(obs):
            if i in self._frames:
                self._add_stacks(i, leaf, numbers, new, (final_at, final[i], final_numbers))
            else:
                ring = self._plain[i]
                if len(new):
                    write_ring(ring, start - len(new), leaf[0, new])
                write_ring(ring, start, leaf[1:].reshape(-1, *leaf.shape[2:]))
                write_ring(ring, start + length * width, final[i])
        self._last[traj.env_id] = numbers[-1]
        successors = numbers[1:].copy()
        successors[final_at[:, 0], final_at[:, 1]] = final_numbers
        return numbers, successors, continues

    def _add_stacks(self, i: int, obs: Array, numbers: Array, new: Array, finals: tuple[Array, Array, Array]) -> None:
        """Store the stacks of one leaf in temporal order, final observations included."""
        ring, table = self._frames[i], self._stacks[i]
        final_at, final, final_numbers = finals
        none = np.zeros((len(new), ring.depth), np.int64)
        table[numbers[0, new] % self.size] = ring.push(obs[0, new], None, none)
        counters = table[numbers[0] % self.size]
        for t in range(len(obs) - 1):
            before = obs[t]
            ended = np.flatnonzero(final_at[:, 0] == t)
            if len(ended):
                columns = final_at[ended, 1]
                at = ring.push(final[ended], before[columns], counters[columns])
                table[final_numbers[ended] % self.size] = at
                before = before.copy()
                before[columns], counters[columns] = final[ended], at
            counters = ring.push(obs[t + 1], before, counters)
            table[numbers[t + 1] % self.size] = counters

    def _continues(self, env_ids: Array, obs: list[Array]) -> Array:
        """Where an environment's observation equals the one stored last for it, if that is recent."""
        last = self._last[env_ids]
        continues: Array = (last >= 0) & self.is_recent(self.needs(last))
        for leaf, stored in zip(obs, self._leaves(last), strict=True):
            continues &= (leaf == stored).reshape(len(last), -1).all(1)
        return continues

    def _count(self, count: int) -> Array:
        numbers = np.arange(self.high, self.high + count)
        self.high += count
        return numbers

    def state_dict(self) -> dict[str, Any]:
        filled = min(self.high, self.size)
        return {
            "high": self.high,
            "last": self._last,
            "plain": {str(i): array[:filled] for i, array in self._plain.items()},
            "stacks": {str(i): array[:filled] for i, array in self._stacks.items()},
            "frames": {str(i): ring.frames[: min(ring.high, ring.size)] for i, ring in self._frames.items()},
            "frames_high": {str(i): ring.high for i, ring in self._frames.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.high = state["high"]
        self._last[:] = state["last"]
        for name, arrays in (("plain", self._plain), ("stacks", self._stacks)):
            for i, array in arrays.items():
                array[: len(state[name][str(i)])] = state[name][str(i)]
        for i, ring in self._frames.items():
            ring.high = state["frames_high"][str(i)]
            ring.frames[: len(state["frames"][str(i)])] = state["frames"][str(i)]
