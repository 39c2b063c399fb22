"""The ratio of samples to inserts that a replay store keeps."""

from __future__ import annotations

from typing import Any


class RateLimiter:
    """Keeps the ratio of samples to inserts at `samples_per_insert` after the first `min_size` inserts.

    Sampling never runs ahead of that. Inserts may run ahead by `tolerance` samples, which must be at least the batch
    size, or neither side could proceed. The first `min_size` items allow no samples: learning starts with one update at
    a time, not with a burst.
    """

    def __init__(self, samples_per_insert: float, min_size: int, tolerance: float):
        self._ratio, self._min_size, self._tolerance = samples_per_insert, min_size, tolerance
        self.inserted = 0
        self.sampled = 0
        self._shift = 0.0  # of the samples that are allowed, from settings that were different before

    @property
    def available_samples(self) -> float:
        """Samples that the inserted items allow and that were not drawn yet."""
        return self._ratio * (self.inserted - self._min_size) - self.sampled + self._shift

    def may_sample(self, count: int) -> bool:
        # A ratio such as 0.1 is not exact.
        return self.inserted >= self._min_size and self.available_samples > count - 1e-6

    def may_insert(self) -> bool:
        return self.available_samples <= self._tolerance

    def state_dict(self) -> dict[str, Any]:
        settings = {"ratio": self._ratio, "min_size": self._min_size}
        return {"inserted": self.inserted, "sampled": self.sampled, "shift": self._shift, "settings": settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the counts. Settings that were different before count for what is inserted from now on: for all the
        items so far, a higher ratio would mean a burst of samples, and a lower one none for a long time.
        """
        self.inserted, self.sampled = state["inserted"], state["sampled"]
        before = state.get("settings")  # missing in checkpoints of earlier versions, like the shift
        self._shift = state.get("shift", 0.0)
        if before is None or before == {"ratio": self._ratio, "min_size": self._min_size}:
            return
        allowed = before["ratio"] * (self.inserted - before["min_size"]) - self.sampled + self._shift
        due = self._ratio * max(0, self.inserted - self._min_size)
        self._shift = max(0.0, allowed) - due + self.sampled
