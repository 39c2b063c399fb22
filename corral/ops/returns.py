"""Generalised advantage estimation (Schulman et al., 2015)."""

from __future__ import annotations

import numpy as np

from corral.core.types import Array
from corral.ops.scan import reverse_scan


def gae(
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    faulty: Array,
    gamma: float,
    lam: float,
) -> Array:
    """Advantages [T, B].

    delta[t] = r[t] + gamma * (1 - terminated[t]) * next_value[t] - value[t]
    A[t] = delta[t] + gamma * lam * (1 - terminated[t] | truncated[t]) * A[t + 1]

    `next_value[t]` is the value of the true successor of row `t`, the last observation of an episode included,
    so a truncated row bootstraps and a terminated one does not, truncated as well or not. A faulty row has
    A = 0, and with that the row before it bootstraps from its own successor.
    """
    delta = np.where(faulty, 0, reward + gamma * next_value * ~terminated - value)
    decay = (~(terminated | truncated | faulty)).astype(delta.dtype) * (gamma * lam)
    return reverse_scan(delta, decay)
