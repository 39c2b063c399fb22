"""Which seed a reset gets when the caller names none: the adapters to Gymnasium and SB3 share this rule."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from corral.core.errors import UserError


class ResetSeeds:
    """Seeds of successive resets.

    A seed that is given counts. Without one, the first reset gets `first` (the seed of `make_vec`) and each
    later one a fresh seed from a generator that started with the last seed given, so that a run repeats
    exactly and still plays new episodes after every reset.
    """

    def __init__(self, first: int):
        self._waiting: int | None = first
        self._fresh = np.random.default_rng(first)

    def next(self, seed: Any = None) -> int:
        """Seed of the reset that is about to happen."""
        if seed is not None:
            self.plan(seed)
        planned, self._waiting = self._waiting, None
        return int(self._fresh.integers(2**31)) if planned is None else planned

    def plan(self, seed: Any) -> None:
        """Use this seed for the next reset."""
        try:
            self._waiting = operator.index(seed)
            self._fresh = np.random.default_rng(self._waiting)
        except (TypeError, ValueError):
            raise UserError(
                f"seed must be one non-negative whole number, got {seed!r}; Corral derives a different seed "
                "for each environment from it."
            ) from None
