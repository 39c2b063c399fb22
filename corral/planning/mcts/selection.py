"""Selection: from the root along the best edges, to an unvisited edge or the end of an episode.

Several simulations of a tree may be in flight: each counts as a visit whose return is unknown (WU-UCT, Liu et al.
2020), so that the next one goes elsewhere. With one at a time this is the sequential search.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from corral.core.jit import compiled
from corral.core.types import Array
from corral.planning.mcts.forest import NO_NODE, TERMINAL, Forest, Wave
from corral.planning.mcts.gumbel import Gumbel, gumbel_edge, gumbel_root_edge
from corral.planning.mcts.tree import finish, start

_TINY = 1e-9
_C_BASE = 19652.0


class Puct(NamedTuple):
    """PUCT: score(a) = q(a) + c prior(a) sqrt(N) / (1 + n(a)), c = c_init + log((N + 19652 + 1) / 19652).

    N counts the visits of a node including its creation, n(a) those of an edge. q is the mean return of an edge, scaled
    to 0..1 by the lowest and highest return of the tree; an unvisited edge has the mean of its node (Silver et al.
    2018; Schrittwieser et al. 2020). With sampled actions, progressive widening (Coulom 2007) limits a node with N
    visits to the first k N^alpha samples, as if they were drawn one by one; priors are normalized over those.
    """

    c_init: float = 1.25
    widen_k: float = 0.0  # 0: all edges from the start
    widen_alpha: float = 0.5


@partial(compiled, error_model="numpy")
def puct_edge(forest: Forest, t: int, node: int, rule: Puct) -> int:
    """The edge with the best score, the first among equals."""
    n = forest.visits[t, node] + forest.pending[t, node]
    explore = (rule.c_init + math.log((n + _C_BASE + 1.0) / _C_BASE)) * math.sqrt(n)
    width = forest.prior.shape[2]
    if rule.widen_k > 0:
        width = min(width, math.ceil(rule.widen_k * n**rule.widen_alpha))
        share = 0.0
        for a in range(width):
            share += max(forest.prior[t, node, a], 0.0)
        explore /= max(share, _TINY)
    mean = float(forest.value[t, node])
    for a in range(forest.prior.shape[2]):  # also beyond the width: simulations in flight may have opened those
        mean += forest.total[t, node, a]
    unknown = mean / forest.visits[t, node]
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


_FEW = 4  # outcomes are few if at least one draw in 4 repeats a known one


@partial(compiled, error_model="numpy")
def follow(forest: Forest, t: int, node: int, edge: int, stochastic: bool) -> int:
    """The node that an edge leads to; NO_NODE if it must be stepped, for the first or another outcome.

    Double progressive widening (Couetoux et al. 2011): n visits of an edge draw sqrt(n) outcomes; one, if steps are not
    stochastic. Draws are counted, not distinct outcomes: stopping after enough distinct ones would overweight rare
    ones. If distinct outcomes are few, judged by the draws below all other edges of the tree, every visit draws one.

    Visits are divided among outcomes in proportion to their draws, rounded by Webster's method; an outcome with fewer
    visits than draws comes first.
    """
    child: int = forest.child[t, node, edge]
    if child == NO_NODE or not stochastic:
        return child
    seen, drawn, best, least = 0, 0, child, math.inf
    while child != NO_NODE:
        draws = forest.draws[t, child]
        seen, drawn = seen + 1, drawn + draws
        visits = (forest.visits[t, child] + forest.pending[t, child] + 0.5) / draws
        if visits < least:
            best, least = child, visits
        child = forest.sibling[t, child]
    if least < 1.0:
        return best
    redraws, repeats = forest.redraws[t] - (drawn - 1), forest.repeats[t] - (drawn - seen)
    few_outcomes = redraws > 0 and _FEW * repeats >= redraws
    n = forest.n[t, node, edge] + forest.inflight[t, node, edge]
    return NO_NODE if few_outcomes or drawn < n**0.5 else best


@partial(compiled, nogil=True, error_model="numpy")
def select(
    forest: Forest, wanted: Array, leaves: int, puct: Puct | None, gumbel: Gumbel, stochastic: bool,
    discount: float, wave: Wave,
) -> int:  # fmt: skip
    """Start up to `leaves` simulations per tree, at most as many as it wants; returns their number. The rule is
    `gumbel` if `puct` is None, which numba tests while compiling; a test of `gumbel` would count its references.

    A tree starts no more once it reaches an edge that a simulation in flight will expand, or while its root waits for
    results. A simulation that reaches the end of an episode, or a node without legal actions, needs no step and
    finishes at once.
    """
    found, scores = 0, np.zeros(forest.prior.shape[2])
    for t in range(len(wanted)):
        in_flight = 0
        while in_flight < min(leaves, wanted[t]):
            node, edge = 0, -1
            while not forest.flags[t, node] & TERMINAL:
                if puct is not None:
                    edge = puct_edge(forest, t, node, puct)
                elif node:
                    edge = gumbel_edge(forest, t, node, gumbel, scores)
                else:
                    edge = gumbel_root_edge(forest, t, gumbel, scores)
                below = NO_NODE if edge < 0 else follow(forest, t, node, edge, stochastic)
                if below == NO_NODE:
                    break
                node, edge = below, -1
            if edge < 0 and node:
                finish(forest, t, node, discount)
                wanted[t] -= 1
                continue
            if edge < 0 or (forest.child[t, node, edge] == NO_NODE and forest.inflight[t, node, edge]):
                break
            start(forest, t, node, edge, 1)
            wave.tree[found], wave.node[found], wave.edge[found] = t, node, edge
            found, in_flight = found + 1, in_flight + 1
    return found
