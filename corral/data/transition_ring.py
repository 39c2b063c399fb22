"""The ring buffer of transitions for replay."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cache
from typing import Any

import numpy as np

from corral.core.jit import compiled
from corral.core.machine import require_memory
from corral.core.spaces import Layout
from corral.core.types import Array
from corral.data.frame_ring import write_ring
from corral.data.nstep import NStepWindows


class TransitionRing:
    """Transitions with absolute numbers `low` to `high`; number `i` is in slot `i % capacity`.

    The oldest are evicted when there are more than `capacity`, and when an observation they refer to has been
    overwritten. `need` is, for each ring of observations, the oldest counter that a row *or any later row* refers to;
    it ascends, so evicted rows are always at the front.
    """

    def __init__(self, capacity: int, action: Layout, rings: int):
        self.capacity = capacity
        self.low = self.high = 0
        self.obs, self.next_obs = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        self.reward, self.discount = np.zeros(capacity, np.float32), np.zeros(capacity, np.float32)
        self.action = [np.zeros((capacity, *leaf.shape), leaf.dtype) for leaf in action.leaves]
        self.extras: dict[str, Array] = {}  # allocated when the first arrive
        self._need = np.zeros((rings, capacity), np.int64)

    def __len__(self) -> int:
        return self.high - self.low

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    def append(self, windows: NStepWindows, needs: Array) -> None:
        """Add transitions and their needs [m, rings]; at most `capacity` at once."""
        count = len(windows.obs)
        if count == 0:
            return
        for array, leaf in zip(self.action, windows.action, strict=True):
            write_ring(array, self.high, leaf)
        for name, column in windows.extras.items():
            if name not in self.extras:
                self.extras[name] = self._allocate(name, column)
            write_ring(self.extras[name], self.high, column)
        lowest = _compiled_append()(
            self.high, (self.obs, self.next_obs, self.reward, self.discount), self._need,
            (windows.obs, windows.next_obs, windows.reward, windows.discount), needs,
        )  # fmt: skip
        self.low = max(self.low, self.high + count - self.capacity)  # first: these are overwritten now
        for ring, need in enumerate(lowest.tolist()):
            self._lower_needs(ring, need)
        self.high += count

    def _allocate(self, name: str, like: Array) -> Array:
        require_memory(self.capacity * like[0].nbytes, self.capacity, f"Replay of the extra '{name}'")
        return np.zeros((self.capacity, *like.shape[1:]), like.dtype)

    def evict(self, alive_from: Array) -> None:
        for ring, oldest in enumerate(alive_from):
            need = self._need[ring]
            if len(self) and need[self.low % self.capacity] < oldest:
                line = range(self.low, self.high)
                self.low += bisect_left(line, oldest, key=lambda i, need=need: need[i % self.capacity])  # type: ignore[misc]

    def _lower_needs(self, ring: int, lowest: int) -> None:
        """Keep `need` ascending when a row refers to something older than the rows before it."""
        need = self._need[ring]
        if len(self) and need[(self.high - 1) % self.capacity] > lowest:
            line = range(self.low, self.high)
            first = self.low + bisect_right(line, lowest, key=lambda i: need[i % self.capacity])
            need[np.arange(first, self.high) % self.capacity] = lowest

    def _arrays(self) -> list[Array]:
        return [self.obs, self.next_obs, self.reward, self.discount, *self._need, *self.action]

    def state_dict(self) -> dict[str, Any]:
        filled = min(self.high, self.capacity)
        arrays = {str(i): array[:filled] for i, array in enumerate(self._arrays())}
        extras = {name: column[:filled] for name, column in self.extras.items()}
        return {"low": self.low, "high": self.high, "arrays": arrays, **({"extras": extras} if extras else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.low, self.high = state["low"], state["high"]
        for i, array in enumerate(self._arrays()):
            array[: len(state["arrays"][str(i)])] = state["arrays"][str(i)]
        for name, column in state.get("extras", {}).items():
            self.extras[name] = self._allocate(name, np.asarray(column))
            self.extras[name][: len(column)] = column


def _append(high: int, columns: tuple[Array, ...], need: Array, new: tuple[Array, ...], needs: Array) -> Array:
    """Write rows to the slots from `high` on, with `need` ascending among them. Returns their lowest needs."""
    obs, next_obs, reward, discount = columns
    new_obs, new_next, new_reward, new_discount = new
    count, capacity, lowest = len(new_obs), len(obs), needs[-1].copy()
    for i in range(count - 1, -1, -1):
        slot = (high + i) % capacity
        obs[slot], next_obs[slot] = new_obs[i], new_next[i]
        reward[slot], discount[slot] = new_reward[i], new_discount[i]
        for ring in range(len(lowest)):
            lowest[ring] = min(lowest[ring], needs[i, ring])
            need[ring, slot] = lowest[ring]
    return lowest  # type: ignore[no-any-return]


_compiled_append = cache(lambda: compiled(_append))  # numba is imported on first use
