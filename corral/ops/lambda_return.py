"""Lambda returns."""

from __future__ import annotations

import numpy as np

from corral.core.types import Array
from corral.ops.scan import cut_after, reverse_scan


def lambda_return(
    reward: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    faulty: Array,
    gamma: float,
    lam: float,
) -> Array:
    """Targets of the value [T, B].

    R[t] = r[t] + gamma * (1 - terminated[t]) * ((1 - lam) * next_value[t] + lam * R[t + 1])

    Where the episode ends at `t`, a faulty row follows, or the data ends, `next_value[t]` stands for R[t + 1].
    A faulty row has R = 0. This is GAE plus the value.
    """
    goes_on = ~cut_after(truncated, terminated, faulty)
    decay = (~terminated & ~faulty).astype(reward.dtype) * gamma
    own = np.where(faulty, 0, reward + decay * next_value * (1 - lam * goes_on.astype(reward.dtype)))
    return reverse_scan(own, decay * goes_on * lam)
