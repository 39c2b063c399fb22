"""Sets of environment ids, checked once and then recognised by identity.

Callers mostly send back the array of ids they received, and workers reply with the bytes they were sent, so sets are
cached in all their forms. Saving a numpy call matters when a step takes microseconds: masks, plain Python integers with
one bit per environment, replace most of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array

_WIRE = np.dtype("<i8")


@dataclass(slots=True, eq=False)
class IdSet:
    """Distinct environment ids in a fixed order, in all their forms."""

    ids: Array  # int64, read-only
    index: slice | Array  # the same rows, as a slice if possible: cheaper to read and write
    mask: int  # bit i stands for environment i
    numbers: tuple[int, ...]
    payload: bytes  # as transmitted

    def __len__(self) -> int:
        return len(self.numbers)


T = TypeVar("T")


class SetCache(dict[IdSet, T]):
    """What a backend computes once for each set of ids in use."""

    def __init__(self, num_envs: int):
        super().__init__()
        self._limit = _max_sets(num_envs)

    def __setitem__(self, chosen: IdSet, value: T) -> None:
        if len(self) >= self._limit:
            self.clear()
        super().__setitem__(chosen, value)


class IdSets:
    """The sets of ids in use among `num_envs` environments."""

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self._limit = _max_sets(num_envs)
        self.all_envs = self._make(np.arange(num_envs, dtype=_WIRE))
        self._forget()

    def of(self, env_ids: Array) -> IdSet:
        """The set for an array of ids; UserError unless they are distinct and in range."""
        known = self._by_identity.get(id(env_ids))
        if known is not None and known.ids is env_ids:
            return known
        ids = np.asarray(env_ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise UserError(f"env_ids must be a non-empty 1-D integer array, got {env_ids!r}.")
        ids = ids.astype(_WIRE)
        known = self._by_payload.get(ids.tobytes())
        if known is not None:
            return known
        if ids.min() < 0 or ids.max() >= self.num_envs or len(np.unique(ids)) != len(ids):
            raise UserError(f"env_ids must be distinct and in 0..{self.num_envs - 1}, got {ids.tolist()[:16]}.")
        return self._keep(self._make(ids))

    def of_payload(self, payload: bytes) -> IdSet:
        known = self._by_payload.get(payload)
        return known if known is not None else self._keep(self._make(np.frombuffer(payload, _WIRE).copy()))

    def of_mask(self, mask: int) -> IdSet:
        known = self._by_mask.get(mask)
        if known is None:
            ids = np.flatnonzero(self.bools(mask)).astype(_WIRE)
            known = self._by_mask[mask] = self.of_payload(ids.tobytes())
        return known

    def bools(self, mask: int) -> Array:
        packed = np.frombuffer(mask.to_bytes(-(-self.num_envs // 8), "little"), np.uint8)
        return np.unpackbits(packed, count=self.num_envs, bitorder="little").astype(np.bool_)

    def _make(self, ids: Array) -> IdSet:
        ids.flags.writeable = False  # recognised by identity, so it must not change
        numbers = tuple(ids.tolist())
        return IdSet(ids, row_index(ids), sum(1 << i for i in numbers), numbers, ids.tobytes())

    def _keep(self, chosen: IdSet) -> IdSet:
        if len(self._by_payload) >= self._limit:
            self._forget()
        self._by_payload[chosen.payload] = self._by_identity[id(chosen.ids)] = chosen
        return chosen

    def _forget(self) -> None:
        all_envs = self.all_envs
        self._by_identity: dict[int, IdSet] = {id(all_envs.ids): all_envs}
        self._by_payload: dict[bytes, IdSet] = {all_envs.payload: all_envs}
        self._by_mask: dict[int, IdSet] = {all_envs.mask: all_envs}


def _max_sets(num_envs: int) -> int:
    return max(256, 4 * num_envs)


def row_index(ids: Array) -> slice | Array:
    """The same rows as a slice, which is cheaper to read and write, if they are evenly spaced."""
    if len(ids) == 1:
        return slice(int(ids[0]), int(ids[0]) + 1)
    steps = np.diff(ids)
    if steps[0] > 0 and (steps == steps[0]).all():
        return slice(int(ids[0]), int(ids[-1]) + 1, int(steps[0]))
    return ids
