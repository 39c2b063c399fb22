"""Sequences that are used once, mixed with replayed ones (IMPALA section 5.2.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from corral.core.errors import UserError
from corral.core.types import DataSpec, EnvSpec, Sample, Trajectory, cat
from corral.data.fifo import FifoStore
from corral.data.sequence_ring import SequenceRing


class MixedStore(FifoStore):
    """Batches of new sequences, each used once as new, and of `data.replayed * batch_size` replayed ones.

    Sequences are kept after their first use, up to `data.capacity`, and sampled uniformly with replacement. Policy lag
    (`drop_older`) applies to new sequences only.
    """

    def __init__(self, spec: EnvSpec, data: DataSpec, num_envs: int, seed: int = 0):
        self._drawn = round(data.replayed * data.batch_size)
        if not 0 < self._drawn < data.batch_size:
            raise UserError(
                f"A batch of {data.batch_size} sequences, {data.replayed:g} of them replayed, needs at least one of "
                "each kind: raise batch_size, or change replay_fraction."
            )
        super().__init__(spec, replace(data, batch_size=data.batch_size - self._drawn), num_envs)
        self._ring = SequenceRing(spec, data.capacity)
        self._rng = np.random.default_rng(np.random.SeedSequence(seed))
        self._replayed = 0

    def get(self) -> Sample:
        """The oldest new sequences, followed by replayed ones."""
        new = super().get().batch
        assert isinstance(new, Trajectory)
        self._ring.add(new)
        self._replayed += self._drawn
        return Sample(cat([new, self._ring.take(self._rng.integers(0, len(self._ring), self._drawn))]))

    def metrics(self) -> dict[str, float]:
        """Sizes and counts, in sequences; `sampled` counts new ones, `replayed` replayed ones."""
        return super().metrics() | {
            "store/replay_size": float(len(self._ring)),
            "store/replayed": float(self._replayed),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "new": super().state_dict(),
            "ring": self._ring.state_dict(),
            "rng": dict(self._rng.bit_generator.state),
            "replayed": self._replayed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["new"])
        self._ring.load_state_dict(state["ring"])
        self._rng.bit_generator.state = state["rng"]
        self._replayed = state["replayed"]
