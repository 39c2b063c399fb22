"""The linear recurrence that advantages and returns share, run backwards through time."""

from __future__ import annotations

import numpy as np

from corral.core.types import Array


def reverse_scan(term: Array, decay: Array) -> Array:
    """x[t] = term[t] + decay[t] * x[t + 1], with x[T] = 0. All [T, B]."""
    result = np.empty_like(term)
    carry = np.zeros(term.shape[1:], term.dtype)
    for t in range(len(term) - 1, -1, -1):
        carry = np.multiply(decay[t], carry, out=result[t])
        carry += term[t]
    return result


def cut_after(truncated: Array, terminated: Array, faulty: Array) -> Array:
    """Rows after which nothing more is known of the episode: its end, a fault in the next row, the last row."""
    cut: Array = terminated | truncated
    cut[:-1] |= faulty[1:]
    cut[-1:] = True
    return cut
