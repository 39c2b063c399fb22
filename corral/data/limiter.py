"""How many samples may be drawn for what was put in."""

from __future__ import annotations

from typing import Any


class RateLimiter:
    """Keeps `sampled` at `samples_per_insert * (inserted - min_size)`.

    Samples never run ahead of that. Inserts may run ahead by `tolerance` samples, which must be at least the
    batch size, or else neither side could move. The first `min_size` items pay for no samples: learning
    starts with one update at a time and not with a burst.
    """

    def __init__(self, samples_per_insert: float, min_size: int, tolerance: float):
        self._ratio, self._min_size, self._tolerance = samples_per_insert, min_size, tolerance
        self.inserted = 0
        self.sampled = 0

    @property
    def owed(self) -> float:
        """Samples that the items put in so far have paid for and that were not drawn yet."""
        return self._ratio * (self.inserted - self._min_size) - self.sampled

    def may_sample(self, count: int) -> bool:
        """Whether a batch of `count` may be drawn."""
        return self.inserted >= self._min_size and self.owed > count - 1e-6  # a ratio of 0.1 is not exact

    def may_insert(self) -> bool:
        """Whether more may be put in, or sampling has to catch up first."""
        return self.owed <= self._tolerance

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {"inserted": self.inserted, "sampled": self.sampled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these counts."""
        self.inserted, self.sampled = state["inserted"], state["sampled"]
