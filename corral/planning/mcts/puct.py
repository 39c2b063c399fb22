"""PUCT: score(a) = q(a) + c prior(a) sqrt(N) / (1 + n(a)), c = c_init + log((N + c_base + 1) / c_base).

N counts a node's visits, the one that made it included, n(a) an edge's. q is the mean return of an edge, between 0 and
1 by the least and the greatest return of the tree; of an edge that nobody has followed it is the mean of its node less
`fpu_reduction` (Silver et al. 2018; Schrittwieser et al. 2020).

Where actions are sampled, progressive widening (Coulom 2007) lets a node with N visits try only the first k N^alpha of
its samples, which is the same as drawing them one by one; priors are then shares of those.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from corral.core.jit import compiled
from corral.planning.mcts.forest import Forest

_TINY = 1e-9


class Puct(NamedTuple):
    """Constants of the score."""

    c_init: float = 1.25
    c_base: float = 19652.0
    fpu_reduction: float = 0.0
    widen_k: float = 0.0
    """0: all edges from the beginning."""
    widen_alpha: float = 0.5


def _puct_edge(forest: Forest, t: int, node: int, rule: Puct) -> int:
    """The edge with the best score, the first of equals."""
    n = forest.visits[t, node] + forest.pending[t, node]
    explore = (rule.c_init + math.log((n + rule.c_base + 1.0) / rule.c_base)) * math.sqrt(n)
    width = forest.prior.shape[2]
    if rule.widen_k > 0:
        width = min(width, math.ceil(rule.widen_k * n**rule.widen_alpha))
        share = 0.0
        for a in range(width):
            share += max(forest.prior[t, node, a], 0.0)
        explore /= max(share, _TINY)
    mean = float(forest.value[t, node])
    for a in range(forest.prior.shape[2]):  # those beyond the width too, which simulations in flight have opened
        mean += forest.total[t, node, a]
    unknown = mean / forest.visits[t, node] - rule.fpu_reduction
    low, span = forest.low[t], forest.high[t] - forest.low[t]
    best, best_score = -1, -math.inf
    for a in range(width):
        p = forest.prior[t, node, a]
        if p < 0:
            continue
        k = forest.n[t, node, a]
        q = forest.total[t, node, a] / k if k else unknown
        if span > 0:
            q = (q - low) / span
        score = q + explore * p / (1.0 + k + forest.inflight[t, node, a])
        if score > best_score:
            best, best_score = a, score
    return best


puct_edge: Any = compiled(_puct_edge, error_model="numpy")
