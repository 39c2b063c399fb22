"""Ring buffer of the most recent sequences, stored as columns of arrays."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from corral.core.errors import UserError
from corral.core.machine import require_memory
from corral.core.types import Array, EnvSpec, Trajectory, Tree, tree_map
from corral.data.pack import pack, unpack

_FINALS = ("final_at", "final_obs")
_PER_COLUMN = ("env_id", "version")


class SequenceRing:
    """The last `capacity` sequences, side by side in arrays that are allocated when the first ones arrive."""

    def __init__(self, spec: EnvSpec, capacity: int):
        self._spec, self._capacity = spec, capacity
        self._columns: dict[str, Tree] = {}  # fields of a trajectory, with `capacity` columns
        self._ended: dict[int, Array] = {}  # per slot, the steps at which episodes ended
        self._final: dict[int, list[Array]] = {}  # per slot, the leaves of their final observations
        self._added = 0

    def __len__(self) -> int:
        return min(self._added, self._capacity)

    def add(self, traj: Trajectory) -> None:
        """Keep the columns of a trajectory (the last ones if there are too many) in place of the oldest."""
        if not self._columns:
            self._allocate(traj)
        width = traj.shape[1]
        kept = np.arange(max(0, width - self._capacity), width)
        slots = (self._added + kept) % self._capacity
        self._added += width
        for name, store in self._columns.items():
            value = getattr(traj, name)
            if name in _PER_COLUMN:
                store[slots] = np.broadcast_to(value, width)[kept]  # one version may hold for all
            else:
                tree_map(lambda to, leaf: to.__setitem__((slice(None), slots), leaf[:, kept]), store, value)
        leaves = self._spec.observation.flatten(traj.final_obs)
        for slot, column in zip(slots.tolist(), kept.tolist(), strict=True):
            rows = np.flatnonzero(traj.final_at[:, 1] == column)
            self._ended[slot] = traj.final_at[rows, 0]
            self._final[slot] = [leaf[rows] for leaf in leaves]

    def take(self, slots: Array) -> Trajectory:
        columns = {
            name: store[slots] if name in _PER_COLUMN else tree_map(lambda leaf: leaf.take(slots, axis=1), store)
            for name, store in self._columns.items()
        }
        return Trajectory(**columns, **self._finals(slots.tolist()))

    def _finals(self, slots: list[int]) -> dict[str, Tree]:
        ended = [self._ended[slot] for slot in slots]
        columns = np.repeat(np.arange(len(slots)), [len(times) for times in ended])
        leaves = [np.concatenate(parts) for parts in zip(*(self._final[slot] for slot in slots), strict=True)]
        final_at = np.stack([np.concatenate(ended), columns], 1)
        return {"final_at": final_at, "final_obs": self._spec.observation.unflatten(leaves)}

    def _allocate(self, traj: Trajectory) -> None:
        capacity, width = self._capacity, traj.shape[1]
        sizes: list[int] = []
        for f in fields(Trajectory):
            tree_map(lambda leaf: sizes.append(leaf.nbytes), getattr(traj, f.name))
        require_memory(sum(sizes) // width * capacity, capacity, "Replay", "sequences")
        for f in fields(Trajectory):
            if f.name in _PER_COLUMN:
                self._columns[f.name] = np.zeros(capacity, np.int64)
            elif f.name not in _FINALS:
                self._columns[f.name] = tree_map(
                    lambda leaf: np.zeros((len(leaf), capacity, *leaf.shape[2:]), leaf.dtype), getattr(traj, f.name)
                )

    def state_dict(self) -> dict[str, Any]:
        filled = len(self)
        if not filled:
            return {"added": self._added, "sequences": None}
        columns = {
            name: store[:filled] if name in _PER_COLUMN else tree_map(lambda leaf: leaf[:, :filled], store)
            for name, store in self._columns.items()
        }
        sequences = Trajectory(**columns, **self._finals(list(range(filled))))
        return {"added": self._added, "sequences": pack(sequences, self._spec)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._columns, self._added = {}, 0
        if state["sequences"] is None:
            return
        sequences = unpack(state["sequences"], self._spec)
        if sequences.shape[1] != min(state["added"], self._capacity):
            raise UserError("The saved replay buffer has a different buffer_size: resume with the same settings.")
        self.add(sequences)
        self._added = state["added"]
