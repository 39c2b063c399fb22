"""n-step returns within a fragment, and rewards-to-go."""

from __future__ import annotations

import numpy as np

from corral.core.types import Array
from corral.ops.lambda_return import lambda_return
from corral.ops.scan import cut_after


def nstep_return(
    reward: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    faulty: Array,
    gamma: float,
    n: int,
) -> Array:
    """Targets of the value [T, B].

    R[t] = r[t] + gamma * r[t + 1] + ... + gamma^(m - 1) * r[t + m - 1]
           + gamma^m * (1 - terminated[t + m - 1]) * next_value[t + m - 1]

    where m <= n is the number of steps until the episode ends, a faulty row follows, or the data ends.
    A faulty row has R = 0.
    """
    length = len(reward)
    cut = cut_after(truncated, terminated, faulty)
    reward = np.where(faulty, 0, reward)
    bootstrap = np.where(faulty | terminated, 0, next_value)
    result, open_ = np.zeros_like(reward), ~faulty
    for j in range(min(n, length)):  # rows t whose window reaches t + j
        rows = length - j
        window = open_[:rows]
        ends = window & (cut[j:] if j + 1 < n else True)
        result[:rows] += gamma**j * (reward[j:] * window + gamma * bootstrap[j:] * ends)
        open_[:rows] &= ~cut[j:]
    return result


def discounted_return(
    reward: Array,
    next_value: Array | None,
    terminated: Array,
    truncated: Array,
    faulty: Array,
    gamma: float,
) -> Array:
    """Reward-to-go [T, B]: R[t] = r[t] + gamma * R[t + 1] to the end of the episode.

    What follows a truncated row (or the last row of the data) is worth its `next_value`, or nothing where that is
    None. Faulty rows, which padding is marked as, have R = 0.
    """
    beyond = np.zeros_like(reward) if next_value is None else next_value
    return lambda_return(reward, beyond, terminated, truncated, faulty, gamma, 1.0)
