"""Gumbel search (Danihelka et al. 2022): root actions sampled without replacement, sequential halving, completed Q.

completed(a) is the mean return of an edge, or for an unvisited edge v_mix = (v + sum N * sum_visited(prior q) /
sum_visited(prior)) / (1 + sum N). sigma(a) = (c_visit + max N) c_scale completed(a), with completed scaled to 0..1 by
the lowest and the highest of the node. The improved policy is softmax(log prior + sigma); the value of a root is the
mean of completed(a) under it, because sequential halving visits bad actions as well.

At the root, the next simulation takes the action with the highest gumbel(a) + log prior(a) + sigma(a) among those with
exactly as many visits as sequential halving requires, once the results of all candidates are known. Below the root it
takes the action with the highest improved(a) - N(a) / (1 + sum N), so that visits follow the improved policy without
noise.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from corral.core.jit import compiled
from corral.core.types import Array
from corral.planning.mcts.forest import Forest

_TINY, _LEAST_PRIOR = 1e-8, 1e-38


class Gumbel(NamedTuple):
    """Constants of the score, and the random numbers of the roots."""

    noise: Array  # [tree, edge] float64
    order: Array  # [tree, simulation] int32, see `visits_in_order`
    before: Array  # [tree, edge] int32, root visits from an earlier search
    c_visit: float = 50.0
    c_scale: float = 0.1
    grain: float = 0.0  # value differences below this fraction of the values are scaled down
    least: float = 0.0  # value differences below this are scaled down


def visits_in_order(considered: int, simulations: int) -> Array:
    """Sequential halving: the visits that the next action must have, for every simulation."""
    if considered <= 1:
        return np.arange(simulations, dtype=np.int32)
    rounds = math.ceil(math.log2(considered))
    order: list[int] = []
    visits = [0] * considered
    left = considered
    while len(order) < simulations:
        for _ in range(max(1, int(simulations / (rounds * left)))):
            order += visits[:left]
            visits[:left] = [count + 1 for count in visits[:left]]
        left = max(2, left // 2)
    return np.array(order[:simulations], np.int32)


@partial(compiled, error_model="numpy")
def complete_q(forest: Forest, t: int, node: int, out: Array) -> None:
    """completed(a) of every edge; edges that do not exist are left out."""
    width = forest.prior.shape[2]
    visited, weighted, known = 0, 0.0, 0.0
    for a in range(width):
        k = forest.n[t, node, a]
        if k:
            p = max(float(forest.prior[t, node, a]), _LEAST_PRIOR)
            weighted += p * forest.total[t, node, a] / k
            known += p
            visited += k
    mixed = float(forest.value[t, node])
    if visited:
        mixed = (mixed + visited * weighted / known) / (1.0 + visited)
    for a in range(width):
        if forest.prior[t, node, a] >= 0:
            k = forest.n[t, node, a]
            out[a] = forest.total[t, node, a] / k if k else mixed


@partial(compiled, error_model="numpy")
def score_edges(forest: Forest, t: int, node: int, rule: Gumbel, out: Array) -> None:
    """log prior + sigma of every edge; -inf for edges that do not exist."""
    complete_q(forest, t, node, out)
    low, high, most = math.inf, -math.inf, 0
    width = forest.prior.shape[2]
    for a in range(width):
        if forest.prior[t, node, a] >= 0:
            low, high, most = min(low, out[a]), max(high, out[a]), max(most, forest.n[t, node, a])
    span = max(high - low, rule.grain * max(abs(low), abs(high)), rule.least, _TINY)
    scale = (rule.c_visit + most) * rule.c_scale
    for a in range(width):
        p = float(forest.prior[t, node, a])
        out[a] = -math.inf if p < 0 else math.log(max(p, _LEAST_PRIOR)) + scale * (out[a] - low) / span


@partial(compiled, error_model="numpy")
def gumbel_root_edge(forest: Forest, t: int, rule: Gumbel, scores: Array) -> int:
    """The next action of sequential halving; -1 while the result of a candidate is in flight."""
    score_edges(forest, t, 0, rule, scores)
    width, started = len(scores), 0
    for a in range(width):
        started += forest.n[t, 0, a] + forest.inflight[t, 0, a] - rule.before[t, a]
    if started >= rule.order.shape[1]:
        return -1
    due, places = rule.order[t, started], 0
    while started + places < rule.order.shape[1] and rule.order[t, started + places] == due:
        places += 1
    most = -1  # as many as are due, or fewer if simulations ended without a result
    for a in range(width):
        n = forest.n[t, 0, a] + forest.inflight[t, 0, a] - rule.before[t, a]
        if forest.prior[t, 0, a] >= 0 and n <= due:
            most = max(most, n)
    best, best_score, candidates, unknown = -1, -math.inf, 0, False
    for a in range(width):
        n = forest.n[t, 0, a] + forest.inflight[t, 0, a] - rule.before[t, a]
        if forest.prior[t, 0, a] >= 0 and n == most:
            candidates += 1
            unknown |= forest.inflight[t, 0, a] > 0
            score = rule.noise[t, a] + scores[a]
            if score > best_score:
                best, best_score = a, score
    return -1 if unknown and candidates > places else best


@partial(compiled, error_model="numpy")
def gumbel_edge(forest: Forest, t: int, node: int, rule: Gumbel, scores: Array) -> int:
    """The action whose visits are furthest behind the improved policy."""
    score_edges(forest, t, node, rule, scores)
    width, top, started = len(scores), -math.inf, 0
    for a in range(width):
        top = max(top, scores[a])
        started += forest.n[t, node, a] + forest.inflight[t, node, a]
    whole = 0.0
    for a in range(width):
        scores[a] = math.exp(scores[a] - top)
        whole += scores[a]
    best, best_score = -1, -math.inf
    for a in range(width):
        if forest.prior[t, node, a] >= 0:
            n = forest.n[t, node, a] + forest.inflight[t, node, a]
            score = scores[a] / whole - n / (1.0 + started)
            if score > best_score:
                best, best_score = a, score
    return best
