"""Sequences that are used once, mixed with replayed ones (IMPALA section 5.2.2)."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from corral.core.errors import UserError
from corral.core.machine import available_bytes
from corral.core.types import Array, DataSpec, EnvSpec, Sample, Trajectory, Tree, cat, tree_map
from corral.data.fifo import FifoStore
from corral.data.pack import pack, unpack
from corral.data.store import START, Store, StoreContext


class MixedStore(Store):
    """Batches of new sequences, each used once as new, and of `data.replayed * batch_size` replayed ones.

    Sequences are kept after their first use, up to `data.capacity`, and sampled uniformly with replacement.
    """

    def __init__(self, spec: EnvSpec, data: DataSpec, num_envs: int, seed: int = 0):
        self._drawn = round(data.replayed * data.batch_size)
        if not 0 < self._drawn < data.batch_size:
            raise UserError(
                f"A batch of {data.batch_size} sequences, {data.replayed:g} of them replayed, needs at least one of "
                "each kind: raise batch_size, or change replayed."
            )
        self._new = FifoStore(spec, replace(data, batch_size=data.batch_size - self._drawn), num_envs)
        self._ring = SequenceRing(spec, data.capacity)
        self._rng = np.random.default_rng(np.random.SeedSequence(seed))
        self._replayed = 0

    def put(self, traj: Trajectory, priorities: Array | None = None, ctx: StoreContext = START) -> None:
        self._new.put(traj)

    def room(self) -> bool:
        return self._new.room()

    def ready(self) -> bool:
        return self._new.ready()

    def get(self) -> Sample:
        """The oldest new sequences, followed by replayed ones."""
        new = self._new.get().batch
        assert isinstance(new, Trajectory)
        self._ring.add(new)
        self._replayed += self._drawn
        return Sample(cat([new, self._ring.take(self._rng.integers(0, len(self._ring), self._drawn))]))

    def drop_older(self, version: int) -> int:
        """Drop new sequences of older policies; replayed ones are always old."""
        return self._new.drop_older(version)

    def metrics(self) -> dict[str, float]:
        """Sizes and counts, in sequences; `sampled` counts new ones, `replayed` replayed ones."""
        return self._new.metrics() | {
            "store/replay_size": float(len(self._ring)),
            "store/replayed": float(self._replayed),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "new": self._new.state_dict(),
            "ring": self._ring.state_dict(),
            "rng": dict(self._rng.bit_generator.state),
            "replayed": self._replayed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._new.load_state_dict(state["new"])
        self._ring.load_state_dict(state["ring"])
        self._rng.bit_generator.state = state["rng"]
        self._replayed = state["replayed"]


_FINALS = ("final_at", "final_obs")
_PER_COLUMN = ("env_id", "version")


class SequenceRing:
    """The last `capacity` sequences, side by side in arrays that are allocated when the first ones arrive."""

    def __init__(self, spec: EnvSpec, capacity: int):
        self._spec, self._capacity = spec, capacity
        self._columns: dict[str, Tree] = {}  # fields of a trajectory, with `capacity` columns
        self._ended: dict[int, Array] = {}  # of each slot: when its episodes ended
        self._final: dict[int, list[Array]] = {}  # and the leaves of their final observations
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
                tree_map(lambda to, leaf: _write(to, slots, leaf[:, kept]), store, value)
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
        needed, available = sum(sizes) // width * capacity, available_bytes()
        if available is not None and needed > available:
            raise UserError(
                f"A replay of {capacity:,} sequences takes {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are "
                f"free: lower buffer_size to {max(1, int(0.9 * capacity * available / needed)):,} or less."
            )
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
            raise UserError("The saved replay had another buffer_size: resume with the same settings.")
        self.add(sequences)
        self._added = state["added"]


def _write(to: Array, slots: Array, columns: Array) -> None:
    to[:, slots] = columns
