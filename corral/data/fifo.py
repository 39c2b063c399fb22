"""A queue of sequences that are used once."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from corral.core.errors import RunFailed, UserError
from corral.core.types import Array, DataSpec, EnvSpec, Sample, Trajectory, cat, slice_envs
from corral.data.pack import pack_all, unpack_all
from corral.data.store import START, Store, StoreContext, count_metrics, named_extras


class FifoStore(Store):
    """A queue of sequences, one per column of a fragment; each is returned exactly once.

    It holds two batches and one fragment of all environments. `room` is false if another fragment does not fit, and
    `put` then raises an error.
    """

    def __init__(self, spec: EnvSpec, data: DataSpec, num_envs: int):
        self._spec, self._data = spec, data
        self._num_envs, self._capacity = num_envs, 2 * data.batch_size + num_envs
        self._queue: deque[Trajectory] = deque()
        self._used = 0  # columns of the first trajectory already returned
        self._waiting = self._inserted = self._sampled = 0

    def put(self, traj: Trajectory, priorities: Array | None = None, ctx: StoreContext = START) -> None:
        length, width = traj.shape
        if length != self._data.length:
            raise UserError(f"The algorithm needs sequences of {self._data.length} steps, got {length}.")
        if self._waiting + width > self._capacity:
            raise RunFailed(
                f"The store is full: it holds {self._waiting} of at most {self._capacity} sequences, and {width} more "
                "do not fit. Check room() before put(), or take batches more often."
            )
        self._queue.append(replace(traj, extras=named_extras(traj, self._data.extras)))
        self._waiting += width
        self._inserted += width

    def room(self) -> bool:
        return self._waiting + self._num_envs <= self._capacity

    def ready(self) -> bool:
        return self._waiting >= self._data.batch_size

    def get(self) -> Sample:
        """The oldest `batch_size` sequences, side by side."""
        wanted = self._data.batch_size
        if not self.ready():
            raise RunFailed(f"Only {self._waiting} of {wanted} sequences are available: check ready() before get().")
        parts: list[Trajectory] = []
        while wanted:
            head, start = self._queue[0], self._used
            width = head.shape[1]
            self._used = min(width, start + wanted)
            whole = start == 0 and self._used == width
            parts.append(head if whole else slice_envs(head, np.arange(start, self._used)))
            wanted -= self._used - start
            if self._used == width:
                self._queue.popleft()
                self._used = 0
        self._waiting -= self._data.batch_size
        self._sampled += self._data.batch_size
        return Sample(parts[0] if len(parts) == 1 else cat(parts))

    def drop_older(self, version: int) -> int:
        """Also behind newer ones: a restarted actor sends a fragment of the weights that it was started with."""
        if all(np.min(traj.version) >= version for traj in self._queue):
            return 0
        waiting, kept = self._waiting, deque[Trajectory]()
        for traj in self._queue:
            fresh = np.broadcast_to(traj.version, traj.shape[1:]) >= version
            columns = np.flatnonzero(fresh[self._used :]) + self._used
            if len(columns):
                kept.append(slice_envs(traj, columns))
            self._used = 0
        self._queue, self._waiting = kept, sum(traj.shape[1] for traj in kept)
        return waiting - self._waiting

    def metrics(self) -> dict[str, float]:
        return count_metrics(self._waiting, self._inserted, self._sampled)

    def state_dict(self) -> dict[str, Any]:
        return {
            "inserted": self._inserted,
            "sampled": self._sampled,
            "used": self._used,
            "queue": pack_all(self._queue, self._spec),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inserted, self._sampled = state["inserted"], state["sampled"]
        self._queue = deque(unpack_all(state["queue"], self._spec))
        self._used = state["used"]
        self._waiting = sum(traj.shape[1] for traj in self._queue) - self._used
