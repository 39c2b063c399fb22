"""The clipped surrogate objective of PPO (Schulman et al. 2017).

`L = -mean(min(r A, clip(r, 1 - eps, 1 + eps) A))`, `r = exp(logp - old_logp)`. Its gradient with respect to
`logp` is `-r A / n` where the first term is the smaller one, and 0 where the ratio is clipped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from corral.core.types import Array


class Surrogate(NamedTuple):
    """The loss, its gradient with respect to `logp`, and what became of the ratios."""

    loss: float
    grad: Array
    kl: float  # approximately: mean(r - 1 - log r)
    beyond: float  # share of ratios outside the clip


def clipped_surrogate(logp: Array, old_logp: Array, advantage: Array, clip: float) -> Surrogate:
    """The objective of rows `[n]`, in NumPy, with its gradient."""
    n = len(logp)
    log_ratio = logp - old_logp
    ratio = np.exp(log_ratio)
    plain = ratio * advantage
    bounded = np.minimum(np.maximum(ratio, 1 - clip), 1 + clip) * advantage
    grad = np.where(plain <= bounded, plain, 0.0)
    grad *= -1.0 / n
    excess = ratio - 1.0
    kl = float((excess - log_ratio).sum()) / n
    beyond = np.count_nonzero(np.abs(excess) > clip) / n
    return Surrogate(-float(np.minimum(plain, bounded).sum()) / n, grad, kl, beyond)
