"""A simulator that keeps 1 MB of every episode."""

import numpy as np

from corral.testing import CountingEnv


class Leaky(CountingEnv):
    kept = []  # noqa: RUF012

    def reset(self, **options):
        self.kept.append(np.ones(1_000_000, np.uint8))
        return super().reset(**options)
