"""Selection: from the root down along the best edges, until one that nobody has followed or the end of an episode.

Several simulations of a tree may be on their way at once: each counts as a visit whose return is not known yet (Liu et
al. 2020, WU-UCT), so that the next goes elsewhere. With one at a time this is the sequential search.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from corral.core.jit import compiled
from corral.core.types import Array
from corral.planning.mcts.forest import NOWHERE, TERMINAL, Forest, Wave
from corral.planning.mcts.gumbel import Gumbel, gumbel_edge, gumbel_root_edge
from corral.planning.mcts.tree import finish, start

# PUCT: score(a) = q(a) + c prior(a) sqrt(N) / (1 + n(a)), c = c_init + log((N + c_base + 1) / c_base). N counts a
# node's visits, the one that made it included, n(a) an edge's. q is the mean return of an edge, between 0 and 1 by
# the least and the greatest return of the tree; of an edge that nobody has followed it is the mean of its node less
# `fpu_reduction` (Silver et al. 2018; Schrittwieser et al. 2020). Where actions are sampled, progressive widening
# (Coulom 2007) lets a node with N visits try only the first k N^alpha of its samples, which is the same as drawing
# them one by one; priors are then shares of those.


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


_FEW = 4  # one throw in so many that shows what is known: dice with few sides


class ChanceNodes(NamedTuple):
    """Double progressive widening (Couetoux et al. 2011): for n visits of an edge the dice are thrown k n^alpha times.

    Throws are counted and not what they show: to stop when enough different things were seen is to stop at what is
    rare, which would count for too much. Where dice have few sides, they are thrown for every visit; that they have is
    said by the throws below all other edges of the tree, so that it has nothing to do with what was seen below this.
    With k = 0 steps throw no dice, and an edge has one outcome.
    """

    k: float = 0.0
    alpha: float = 0.5


def _follow(forest: Forest, t: int, node: int, edge: int, dice: ChanceNodes) -> int:
    """Where an edge leads, NOWHERE if it has to be stepped: for the first time, or to throw the dice once more.

    Among outcomes, visits are shared out as the dice were seen to fall, rounded as seats are to votes (Webster); one
    that has fewer visits than draws comes first.
    """
    child: int = forest.child[t, node, edge]
    if child == NOWHERE or dice.k == 0:
        return child
    seen, drawn, best, least = 0, 0, child, math.inf
    while child != NOWHERE:
        draws = forest.draws[t, child]
        seen, drawn = seen + 1, drawn + draws
        visits = (forest.visits[t, child] + forest.pending[t, child] + 0.5) / draws
        if visits < least:
            best, least = child, visits
        child = forest.sibling[t, child]
    if least < 1.0:
        return best
    throws, repeats = forest.throws[t] - (drawn - 1), forest.repeats[t] - (drawn - seen)
    few_sides = throws > 0 and _FEW * repeats >= throws
    n = forest.n[t, node, edge] + forest.inflight[t, node, edge]
    return NOWHERE if few_sides or drawn < dice.k * n**dice.alpha else best


follow: Any = compiled(_follow, error_model="numpy")


def _select_puct(
    forest: Forest, wanted: Array, leaves: int, rule: Puct, dice: ChanceNodes, discount: float, wave: Wave
) -> int:
    """Start up to `leaves` simulations in each tree, at most as many as it wants; returns how many there are.

    A tree starts no more when it comes to an edge that another simulation is about to expand. One that comes to the end
    of an episode, or to where nothing can be done, needs no step: it is over at once.
    """
    found = 0
    for t in range(len(wanted)):
        under_way = 0
        while under_way < min(leaves, wanted[t]):
            node, edge = 0, -1
            while not forest.flags[t, node] & TERMINAL:
                edge = puct_edge(forest, t, node, rule)
                below = NOWHERE if edge < 0 else follow(forest, t, node, edge, dice)
                if below == NOWHERE:
                    break
                node, edge = below, -1
            if edge < 0:
                finish(forest, t, node, discount)
                wanted[t] -= 1
                continue
            if forest.child[t, node, edge] == NOWHERE and forest.inflight[t, node, edge]:
                break
            start(forest, t, node, edge, 1)
            wave.tree[found], wave.node[found], wave.edge[found] = t, node, edge
            found, under_way = found + 1, under_way + 1
    return found


def _select_gumbel(
    forest: Forest, wanted: Array, leaves: int, rule: Gumbel, dice: ChanceNodes, discount: float, wave: Wave
) -> int:
    """The same by Gumbel's rules; a tree also starts no more while its root waits for results."""
    found, scores = 0, np.zeros(forest.prior.shape[2])
    for t in range(len(wanted)):
        under_way = 0
        while under_way < min(leaves, wanted[t]):
            node, edge = 0, -1
            while not forest.flags[t, node] & TERMINAL:
                edge = gumbel_edge(forest, t, node, rule, scores) if node else gumbel_root_edge(forest, t, rule, scores)
                below = NOWHERE if edge < 0 else follow(forest, t, node, edge, dice)
                if below == NOWHERE:
                    break
                node, edge = below, -1
            if edge < 0 and node:
                finish(forest, t, node, discount)
                wanted[t] -= 1
                continue
            if edge < 0 or (forest.child[t, node, edge] == NOWHERE and forest.inflight[t, node, edge]):
                break
            start(forest, t, node, edge, 1)
            wave.tree[found], wave.node[found], wave.edge[found] = t, node, edge
            found, under_way = found + 1, under_way + 1
    return found


select_puct: Any = compiled(_select_puct, nogil=True, error_model="numpy")
select_gumbel: Any = compiled(_select_gumbel, nogil=True, error_model="numpy")
