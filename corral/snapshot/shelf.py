"""Ids of states that are kept elsewhere, and what is known of them here: where they are, who moves, what is seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from corral.core.errors import UserError
from corral.core.jit import compiled
from corral.core.spaces import Leaf
from corral.core.types import Array

FREE, EMPTY, LOST = -3, -2, -1  # as a home: nobody has the id, no state has it yet, or its state is gone
_BEGIN_ROWS = 1024
_OWN_BYTES = 16  # of a row, beside its observation


class StateIndex:
    """An id is a row. It grows as far as its memory goes; ids that are released are given out again."""

    def __init__(self, leaves: Sequence[Leaf], memory_mb: float, name: str):
        self._name = name
        self._most = int(memory_mb * 1e6) // (
            _OWN_BYTES + sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in leaves)
        )
        self.home = np.zeros(0, np.int16)
        self.turn = np.zeros(0, np.int8)
        self.obs = [np.zeros((0, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._free = np.zeros(0, np.int64)  # the first `_left` of them count
        self._left = 0
        self._grow(min(_BEGIN_ROWS, self._most))

    def new_ids(self, count: int) -> Array:
        """Ids that nothing has; UserError when there is no room for so many."""
        if count > self._left:
            wanted = len(self.home) + count
            self._grow(max(wanted, min(2 * wanted, self._most)))
        self._left -= count
        ids = self._free[self._left : self._left + count].copy()
        self.home[ids] = EMPTY
        return ids

    def homes_of(self, ids: Array) -> Array:
        """Where these states are, or LOST; UserError for ids that no state has."""
        return self._require(ids, EMPTY)

    def require_given(self, ids: Array) -> None:
        """UserError for ids that nobody was given."""
        self._require(ids, FREE)

    def put(self, ids: Array, turn: Array, obs: Sequence[Array]) -> None:
        """What is seen in states."""
        self.turn[ids] = turn
        for leaf, value in zip(self.obs, obs, strict=True):
            leaf[ids] = value

    def release(self, ids: Array) -> tuple[Array, Array]:
        """Take ids back, but those that nobody has; returns them and where their states were."""
        homes, left = np.empty(len(ids), np.int16), self._left
        self._left = take_back(self.home, ids, self._free, left, homes)
        return self._free[left : self._left].copy(), homes[: self._left - left]

    def _require(self, ids: Array, more_than: int) -> Array:
        homes = np.empty(len(ids), np.int16)
        bad = find_homes(self.home, ids, more_than, homes)
        if bad >= 0:
            raise UserError(
                f"State {ids[bad]} was dropped, or never saved: expand and load what save or expand has given."
            )
        return homes

    def _grow(self, rows: int) -> None:
        old = len(self.home)
        if rows > self._most:
            raise UserError(
                f"A search of {self._name} keeps {old - 1 - self._left:,} states and has memory for {self._most:,} "
                "observations: use fewer simulations or trees, or give it more memory_mb."
            )
        self.home, self.turn = _longer(self.home, rows), _longer(self.turn, rows)
        self.obs = [_longer(leaf, rows) for leaf in self.obs]
        self.home[old:] = FREE
        free = np.arange(rows - 1, max(old, 1) - 1, -1)  # id 0 is nobody's
        self._free = _longer(self._free, rows)
        self._free[self._left : self._left + len(free)] = free
        self._left += len(free)


def _take_back(home: Array, ids: Array, free: Array, left: int, homes: Array) -> int:
    """Put ids that somebody has behind the `left` free ones, once each; how many are free then."""
    before = left
    for key in ids:
        if 0 < key < len(home) and home[key] != FREE:
            homes[left - before], home[key], free[left] = home[key], FREE, key
            left += 1
    return left


def _find_homes(home: Array, ids: Array, more_than: int, homes: Array) -> int:
    """Write where ids are at home; the place of the first that is nowhere, or -1."""
    for i in range(len(ids)):
        if not 0 < ids[i] < len(home) or home[ids[i]] <= more_than:
            return i
        homes[i] = home[ids[i]]
    return -1


take_back: Any = compiled(_take_back)
find_homes: Any = compiled(_find_homes)


def _longer(array: Array, rows: int) -> Array:
    grown = np.zeros((rows, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
