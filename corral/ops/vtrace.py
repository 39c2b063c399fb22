"""V-trace: off-policy corrected values and advantages (Espeholt et al., 2018, IMPALA)."""

from __future__ import annotations

import numpy as np

from corral.core.types import Array
from corral.ops.scan import cut_after, reverse_scan


def vtrace(  # noqa: PLR0913 - the formula has as many symbols
    behaviour_logp: Array,
    target_logp: Array,
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    faulty: Array,
    gamma: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    rho_pg: float | None = 1.0,
    lam: float = 1.0,
) -> tuple[Array, Array]:
    """Targets of the value and advantages of the policy gradient, both [T, B].

    With ratio = exp(target_logp - behaviour_logp), not = 1 - terminated:
    delta[t] = min(rho_bar, ratio[t]) * (r[t] + gamma * not[t] * next_value[t] - value[t])
    vs[t] - value[t] = delta[t] + gamma * lam * min(c_bar, ratio[t]) * (vs[t + 1] - value[t + 1])
    advantage[t] = min(rho_pg, ratio[t]) * (r[t] + gamma * not[t] * vs[t + 1] - value[t])

    Where the episode ends at `t`, a faulty row follows, or the data ends, the difference at `t + 1` is 0 and
    `next_value[t]` stands for vs[t + 1]. A faulty row has vs = value and advantage 0. Without `rho_pg` the advantage
    is not multiplied by a ratio, for objectives that multiply it themselves.
    """
    with np.errstate(over="ignore"):  # an infinite ratio is cut by the bars below
        ratio = np.where(faulty, 0, np.exp(target_logp - behaviour_logp))
    goes_on = ~cut_after(truncated, terminated, faulty) & ~faulty
    onward = (~terminated).astype(value.dtype) * gamma
    delta = np.minimum(rho_bar, ratio) * np.where(faulty, 0, reward + onward * next_value - value)
    correction = reverse_scan(delta, np.minimum(c_bar, ratio) * goes_on * (gamma * lam))
    following = np.zeros_like(correction)
    following[:-1] = correction[1:] * goes_on[:-1]
    gain = np.where(faulty, 0, reward + onward * (next_value + following) - value)
    return value + correction, gain if rho_pg is None else np.minimum(rho_pg, ratio) * gain
