"""What came of acting: the return to the end of the episode, seen by who acted.

G_t = r_t + gamma G_{t+1}, with G_{t+1} negated where another player acts there.
"""

from __future__ import annotations

import numpy as np

from corral.core.types import Array


def outcomes(reward: Array, to_play: Array, gamma: float) -> Array:
    """Returns [T] of one whole episode; `reward[t]` is of who acted at t, `to_play[t]`."""
    result = np.zeros(len(reward))
    later = 0.0
    for t in range(len(reward) - 1, -1, -1):
        if t + 1 < len(reward) and to_play[t + 1] != to_play[t]:
            later = -later
        later = result[t] = reward[t] + gamma * later
    return result
