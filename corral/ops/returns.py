"""Returns and advantages: GAE (Schulman et al. 2015), lambda, n-step and discounted returns, V-trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from corral.core.types import Array


def reverse_scan(term: Array, decay: Array) -> Array:
    """The recurrence x[t] = term[t] + decay[t] * x[t + 1], with x[T] = 0. All [T, B]."""
    result = np.empty_like(term)
    carry = np.zeros(term.shape[1:], term.dtype)
    for t in range(len(term) - 1, -1, -1):
        carry = np.multiply(decay[t], carry, out=result[t])
        carry += term[t]
    return result


def parallel_scan(term: Tensor, decay: Tensor) -> Tensor:
    """`reverse_scan` on a device, in log2(T) rounds: each doubles the number of terms in x[t]."""
    step = 1
    while step < len(term):
        term = torch.cat([term[:-step] + decay[:-step] * term[step:], term[-step:]])
        decay = torch.cat([decay[:-step] * decay[step:], decay[-step:]])
        step *= 2
    return term


def cut_after(truncated: Any, terminated: Any, faulty: Any) -> Any:
    """Rows after which returns must not propagate: episode end, fault in the next row, or last row."""
    cut = terminated | truncated
    cut[:-1] |= faulty[1:]
    cut[-1:] = True
    return cut


def lambda_return(
    reward: Array, next_value: Array, terminated: Array, truncated: Array, faulty: Array, gamma: float, lam: float
) -> Array:
    """Lambda returns [T, B].

    R[t] = r[t] + gamma * (1 - terminated[t]) * ((1 - lam) * next_value[t] + lam * R[t + 1])

    Where the episode ends at `t`, a faulty row follows, or the data ends, `next_value[t]` replaces R[t + 1].
    A faulty row has R = 0. This is GAE plus the value.
    """
    continues = ~cut_after(truncated, terminated, faulty)
    decay = (~terminated & ~faulty).astype(reward.dtype) * gamma
    own = np.where(faulty, 0, reward + decay * next_value * (1 - lam * continues.astype(reward.dtype)))
    return reverse_scan(own, decay * continues * lam)


def gae(
    reward: Array, value: Array, next_value: Array, terminated: Array, truncated: Array, faulty: Array,
    gamma: float, lam: float,
) -> Array:  # fmt: skip
    """Generalised advantage estimation (Schulman et al. 2015): advantages [T, B].

    delta[t] = r[t] + gamma * (1 - terminated[t]) * next_value[t] - value[t]
    A[t] = delta[t] + gamma * lam * (1 - terminated[t] | truncated[t]) * A[t + 1]

    `next_value[t]` is the value of the true successor of row `t`, including final observations: a truncated row
    bootstraps, a terminated one does not (also if both flags are set). A faulty row has A = 0, so the row before it
    bootstraps from its own successor.
    """
    delta = np.where(faulty, 0, reward + gamma * next_value * ~terminated - value)
    decay = (~(terminated | truncated | faulty)).astype(delta.dtype) * (gamma * lam)
    return reverse_scan(delta, decay)


def nstep_return(
    reward: Array, next_value: Array, terminated: Array, truncated: Array, faulty: Array, gamma: float, n: int
) -> Array:
    """n-step returns within a fragment [T, B].

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
    reward: Array, next_value: Array | None, terminated: Array, truncated: Array, faulty: Array, gamma: float
) -> Array:
    """Reward-to-go [T, B]: R[t] = r[t] + gamma * R[t + 1] to the end of the episode.

    A truncated row (or the last row of the data) bootstraps from its `next_value`, or from 0 if that is None. Faulty
    rows, including padding, have R = 0.
    """
    after_end = np.zeros_like(reward) if next_value is None else next_value
    return lambda_return(reward, after_end, terminated, truncated, faulty, gamma, 1.0)


def outcomes(reward: Array, to_play: Array, gamma: float) -> Array:
    """Returns [T] of one whole episode, each from the view of the player who acts.

    G[t] = r[t] + gamma * G[t + 1], with G[t + 1] negated if another player acts there. `reward[t]` is the reward of the
    player `to_play[t]`.
    """
    result = np.zeros(len(reward))
    later = 0.0
    for t in range(len(reward) - 1, -1, -1):
        if t + 1 < len(reward) and to_play[t + 1] != to_play[t]:
            later = -later
        later = result[t] = reward[t] + gamma * later
    return result


def vtrace(  # noqa: PLR0913 - the formula has as many symbols
    behaviour_logp: Any, target_logp: Any, reward: Any, value: Any, next_value: Any,
    terminated: Any, truncated: Any, faulty: Any,
    gamma: float, rho_bar: float = 1.0, c_bar: float = 1.0, rho_pg: float | None = 1.0, lam: float = 1.0,
) -> tuple[Any, Any]:  # fmt: skip
    """V-trace (Espeholt et al. 2018, IMPALA): off-policy value targets and advantages, both [T, B].

    For arrays or tensors. With ratio = exp(target_logp - behaviour_logp), not = 1 - terminated:
    delta[t] = min(rho_bar, ratio[t]) * (r[t] + gamma * not[t] * next_value[t] - value[t])
    vs[t] - value[t] = delta[t] + gamma * lam * min(c_bar, ratio[t]) * (vs[t + 1] - value[t + 1])
    advantage[t] = min(rho_pg, ratio[t]) * (r[t] + gamma * not[t] * vs[t + 1] - value[t])

    Where the episode ends at `t`, a faulty row follows, or the data ends, the difference at `t + 1` is 0 and
    `next_value[t]` replaces vs[t + 1]. A faulty row has vs = value and advantage 0. Without `rho_pg` the advantage
    is not multiplied by a ratio, for objectives that multiply it themselves.
    """
    xp, scan = (torch, parallel_scan) if isinstance(value, Tensor) else (np, reverse_scan)
    with np.errstate(over="ignore"):  # the clips below bound an infinite ratio
        ratio = xp.where(faulty, 0, xp.exp(target_logp - behaviour_logp))
    continues = ~cut_after(truncated, terminated, faulty) & ~faulty
    delta = ratio.clip(max=rho_bar) * xp.where(faulty, 0, reward + gamma * next_value * ~terminated - value)
    correction = scan(delta, ratio.clip(max=c_bar) * continues * (gamma * lam))
    following = xp.zeros_like(correction)
    following[:-1] = correction[1:] * continues[:-1]
    gain = xp.where(faulty, 0, reward + gamma * (next_value + following) * ~terminated - value)
    return value + correction, gain if rho_pg is None else ratio.clip(max=rho_pg) * gain
