"""Sampling in proportion to priorities: a sum tree with eight children per node, compiled by numba."""

from __future__ import annotations

from functools import cache

import numpy as np

from corral.core.jit import compiled
from corral.core.types import Array

_FAN = 8  # eight float64 are one cache line, so a step down or up touches one line


class SumTree:
    """Non-negative weights of `size` slots that are set and sampled in batches.

    A parent is always the sum of its children, added in order: the tree depends on the weights alone, not on the order
    in which they were set, and rounding errors do not accumulate.
    """

    def __init__(self, size: int):
        self.size = size
        counts = [-(-size // _FAN) * _FAN]
        while counts[-1] > _FAN:
            counts.append(-(-counts[-1] // _FAN // _FAN) * _FAN)
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # of the levels, leaves first
        self._nodes = np.zeros(self._starts[-1], np.float64)
        self.max = 0.0
        """The largest weight ever set."""

    @property
    def total(self) -> float:
        return float(self._nodes[self._starts[-2] :].sum())

    @property
    def leaves(self) -> Array:
        """The weights, [size], read-only."""
        return self._nodes[: self.size]

    @property
    def nbytes(self) -> int:
        return self._nodes.nbytes

    def set(self, slots: Array, weights: Array) -> None:
        """Set the weights of slots; if a slot occurs twice, the later one counts."""
        if len(slots):
            self.max = max(self.max, float(weights.max()))
            _compiled_set()(self._nodes, self._starts, slots, weights)

    def sample(self, uniform: Array) -> Array:
        """One slot for each of `n` uniform numbers in [0, 1), in ascending order.

        The i-th is sampled from the i-th of `n` equal intervals of the total (stratified). Slots of weight 0 are never
        sampled; the total must not be 0.
        """
        slots: Array = _compiled_sample()(self._nodes, self._starts, uniform)
        return slots


def _set(nodes: Array, starts: Array, slots: Array, weights: Array) -> None:
    for i in range(len(slots)):
        nodes[slots[i]] = weights[i]
    place = slots.copy()
    for level in range(len(starts) - 2):
        low, high = starts[level], starts[level + 1]
        before = -1
        for i in range(len(place)):
            parent = place[i] // _FAN
            place[i] = parent
            if parent != before:  # neighbours often share their parent
                total = 0.0
                for child in range(low + parent * _FAN, low + (parent + 1) * _FAN):
                    total += nodes[child]
                nodes[high + parent] = total
            before = parent


def _sample(nodes: Array, starts: Array, uniform: Array) -> Array:
    n, top = len(uniform), len(starts) - 2
    total = 0.0
    for node in range(starts[top], starts[top + 1]):
        total += nodes[node]
    mass = np.empty(n, np.float64)
    place = np.zeros(n, np.int64)
    for i in range(n):
        mass[i] = (i + uniform[i]) / n * total
    for step in range(top + 1):  # level by level, so that the samples' memory accesses overlap
        start = starts[top - step]
        for i in range(n):
            rest, found = mass[i], -1
            first = start + place[i] * _FAN
            for child in range(first, first + _FAN):
                weight = nodes[child]
                if weight > 0.0:
                    found = child
                    if rest < weight:
                        break
                    rest -= weight
            else:
                rest = np.inf  # a rounding remainder belongs to the last slot with a weight
            place[i] = found - start
            mass[i] = rest
    return place


# numba is imported on first use
_compiled_set, _compiled_sample = cache(lambda: compiled(_set)), cache(lambda: compiled(_sample))
