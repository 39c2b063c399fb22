"""The root: noise before a search, and the resulting policy and values after it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from corral.core.jit import compiled
from corral.core.types import Array
from corral.planning.mcts.forest import Forest
from corral.planning.mcts.gumbel import Gumbel, complete_q, score_edges, visits_in_order


def mix_noise(forest: Forest, trees: Array, alpha: float, fraction: float, rng: np.random.Generator) -> None:
    """Mix Dirichlet noise into the priors of roots: p <- (1 - fraction) p + fraction Dir(alpha), drawn per root."""
    priors = forest.prior[trees, 0]
    exists = priors >= 0
    drawn = np.where(exists, rng.standard_gamma(alpha, priors.shape), 0.0)
    total = drawn.sum(1, keepdims=True)
    noise = np.where(total > 0, drawn / np.where(total > 0, total, 1.0), np.maximum(priors, 0.0))
    forest.prior[trees, 0] = np.where(exists, (1 - fraction) * priors + fraction * noise, priors)


def draw_gumbel(
    forest: Forest, trees: Array, considered: int, sims: int, scale: float, rng: np.random.Generator
) -> Gumbel:
    """Gumbel noise for roots, and the order in which sequential halving visits their best actions."""
    count, width = forest.prior.shape[0], forest.prior.shape[2]
    noise, order = np.zeros((count, width)), np.zeros((count, sims), np.int32)
    noise[trees] = scale * rng.gumbel(size=(len(trees), width))
    legal = np.count_nonzero(forest.prior[trees, 0] >= 0, axis=1)
    for tree, edges in zip(trees.tolist(), legal.tolist(), strict=True):
        order[tree] = _order(min(considered, edges), sims)
    return Gumbel(noise, order, forest.n[:, 0].copy())


_order = lru_cache(maxsize=256)(visits_in_order)


def visit_policy(forest: Forest, trees: Array) -> Array:
    """Visit counts, normalized, [trees, edges]."""
    n = forest.n[trees, 0].astype(np.float64)
    shares = n / n.max(1, keepdims=True)
    return np.asarray(shares / shares.sum(1, keepdims=True))


@compiled
def _score_roots(forest: Forest, trees: Array, rule: Gumbel, q: Array, scores: Array) -> None:
    for i in range(len(trees)):
        complete_q(forest, trees[i], 0, q[i])
        score_edges(forest, trees[i], 0, rule, scores[i])


class GumbelResult(NamedTuple):
    """The result of a Gumbel search, one row per tree."""

    policy: Array  # [trees, edges], softmax(log prior + sigma(completed q))
    values: Array  # the mean of the completed q under this policy, for the player to move
    winner: Array  # of sequential halving: the best noise + score among the most visited actions


def gumbel_result(forest: Forest, trees: Array, rule: Gumbel) -> GumbelResult:
    """Read the result at the roots."""
    q, scores = np.zeros((2, len(trees), forest.prior.shape[2]))
    _score_roots(forest, trees, rule, q, scores)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    policy = weights / weights.sum(1, keepdims=True)
    n = forest.n[trees, 0] - rule.before[trees]
    noisy = np.where(n == n.max(1, keepdims=True), rule.noise[trees] + scores, -np.inf)
    return GumbelResult(policy, (policy * q).sum(1), noisy.argmax(1))


def root_values(forest: Forest, trees: Array) -> Array:
    """Mean of the evaluation and all returns, for the player to move: the value of a PUCT search."""
    values: Array = (forest.value[trees, 0] + forest.total[trees, 0].sum(1)) / (1 + forest.n[trees, 0].sum(1))
    return values
