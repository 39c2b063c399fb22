"""Tree search: waves of simulations in many trees, with one step call and one evaluation call per wave."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np

from corral.core.errors import RunFailed, UserError
from corral.core.types import Array, Tree, tree_map
from corral.planning.mcts.evaluation import Evaluate, LeafValues
from corral.planning.mcts.forest import NO_NODE, Forest, Wave, make_forest, make_wave
from corral.planning.mcts.gumbel import Gumbel
from corral.planning.mcts.selection import Puct, select
from corral.planning.mcts.tree import backup, expand, plant, reroot
from corral.snapshot.states import Expansion, States, Views

_NO_MARKS = np.zeros(0, np.int64)
_NO_GUMBEL = Gumbel(np.zeros((0, 0)), np.zeros((0, 0), np.int32), np.zeros((0, 0), np.int32))
_ALL: Any = slice(None)


class TreeSearch:
    """Search trees over states, each with up to `leaves` simulations in flight; 1 is the sequential search.

    Args:
        states: of the environments. The search owns the states in its trees, including the roots'.
        evaluate: called once for all roots, and once for all leaves of a wave.
        trees: maximum number of trees.
        width: edges per node.
        sims: maximum simulations per search.
        keep: maximum nodes that a tree keeps from one search to the next.
        to_env: converts edges, or their sampled actions, to environment actions; default: they are the same.
        rng: seeds the steps, so that the search cannot foresee the environment's random numbers; None: it can.
    """

    def __init__(  # noqa: PLR0913 - the parts of a search
        self,
        states: States,
        evaluate: Evaluate,
        trees: int,
        width: int,
        sims: int,
        leaves: int = 1,
        discount: float = 1.0,
        *,
        keep: int = 0,
        to_env: Callable[[Array], Tree] = lambda edges: edges,
        rng: np.random.Generator | None = None,
    ):
        if sims < 1 or leaves < 1:
            raise UserError(f"A search needs at least 1 simulation and 1 leaf in flight, got {sims} and {leaves}.")
        self.states, self.evaluate, self.sims, self.leaves, self.discount = states, evaluate, sims, leaves, discount
        self.forest: Forest = make_forest(trees, sims + 1 + keep, width)
        self.actions: Array | None = None  # [tree, node, edge, ...] sampled actions of the edges
        self.waves = self.steps = 0  # waves have one call of `evaluate` each; steps are those of states
        self._keep, self._to_env, self._rng = keep, to_env, rng
        self._wave = make_wave(trees * leaves)
        self._every = np.ones((trees * leaves, width), np.bool_)

    def run(self, roots: Array, rule: Puct | Gumbel) -> Forest:
        trees = np.arange(len(roots))
        self.plant(trees, roots)
        return self.grow(trees, rule)

    def plant(self, trees: Array, roots: Array) -> None:
        """Start trees at these states and drop their old nodes."""
        self.clear(trees)
        try:
            views = self.states.look(roots)
            leaf_values = self._evaluate(views, roots)
            if not (leaf_values.priors >= 0).any(1).all():
                raise UserError(
                    "A search cannot start from a state with no legal action: reset the environment if the game ended."
                )
        except BaseException:
            self.states.drop(roots)
            raise
        plant(self.forest, trees, roots, views.to_play, leaf_values.priors, leaf_values.values)
        if leaf_values.actions is not None:
            self._store_actions(trees, np.zeros_like(trees), leaf_values.actions)

    def reuse(self, trees: Array, taken: Array, roots: Array) -> Array:
        """Continue trees below the edges taken; returns for which a node has the observation of `roots`."""
        forest, views = self.forest, self.states.look(roots)
        nodes = np.array([self._find(t, a, views, i) for i, (t, a) in enumerate(zip(trees, taken, strict=True))])
        for t, node, root in zip(trees[nodes >= 0], nodes[nodes >= 0], roots[nodes >= 0], strict=True):
            kept, gone = reroot(forest, t, node, self._keep + 1)
            self.states.drop(gone)
            forest.state[t, 0] = root
            if self.actions is not None:
                self.actions[t, : len(kept)] = self.actions[t, kept]
        return nodes >= 0

    def grow(self, trees: Array, rule: Puct | Gumbel, sims: int | None = None, reward_scale: float = 1.0) -> Forest:
        """Run simulations in these trees, by default `sims` of the constructor.

        Step rewards are multiplied by `reward_scale`, the scale of the rewards that values were learned from.
        """
        sims = self.sims if sims is None else sims
        if not 1 <= sims <= self.sims:
            raise UserError(f"This search has room for 1 to {self.sims} simulations, got {sims}.")
        if (self.forest.size[trees] + sims > self.forest.state.shape[1]).any():
            raise UserError("These trees are full: start them again with plant(), or raise `sims` or `keep`.")
        wanted = np.zeros(len(self.forest.size), np.int64)
        wanted[trees] = sims
        while wanted.any():
            if not self._run_wave(wanted, rule, reward_scale):
                raise RunFailed(
                    "A search cannot select an action: its evaluation is not finite, or its rule has no visits left."
                )
        return self.forest

    def clear(self, trees: Array) -> None:
        size = self.forest.size[trees]
        if size.any():
            used = np.arange(self.forest.state.shape[1]) < size[:, None]
            self.states.drop(self.forest.state[trees][used])
            self.forest.size[trees] = 0

    def _run_wave(self, wanted: Array, rule: Puct | Gumbel, reward_scale: float) -> bool:
        """Run one wave of simulations; returns False if none could start."""
        forest, stochastic = self.forest, self.states.stochastic
        rules = (None, rule) if isinstance(rule, Gumbel) else (rule, _NO_GUMBEL)
        wave = self._wave.first(select(forest, wanted, self.leaves, *rules, stochastic, self.discount, self._wave))
        if not len(wave.tree):
            return not wanted.any()
        self._expand(wave, reward_scale)
        backup(forest, wave, self.discount, wanted)
        self.waves += 1
        return True

    def _expand(self, wave: Wave, reward_scale: float) -> None:
        forest, states = self.forest, self.states
        seeds = None if self._rng is None else self._rng.integers(1, 2**63, len(wave.tree), np.uint64)
        edges = wave.edge if self.actions is None else self.actions[wave.tree, wave.node, wave.edge]
        children = states.new_ids(len(wave.tree))
        try:
            steps = states.expand(forest.state[wave.tree, wave.node], self._to_env(edges), children, seeds)
            over = steps.terminated | steps.truncated
            leaf_values = self._evaluate(steps, np.where(over, 0, children))
            if steps.faulty is not None:  # a failed step has its parent's value
                values = np.where(steps.faulty, forest.value[wave.tree, wave.node], leaf_values.values)
                leaf_values = leaf_values._replace(values=values)
        except BaseException:
            states.drop(children)
            raise
        self.steps += len(wave.tree)
        marks = _marks(steps) if states.stochastic else _NO_MARKS
        unused = steps.children.copy()
        expand(
            forest, wave, unused, reward_scale * steps.reward, steps.terminated, steps.truncated,
            steps.to_play, leaf_values.priors, leaf_values.values, marks,
        )  # fmt: skip
        made = _ALL
        if len(marks):
            made = unused == 0
            states.drop(unused[~made])
        if leaf_values.actions is not None:
            self._store_actions(wave.tree[made], wave.new[made], leaf_values.actions[made])

    def _evaluate(self, views: Views | Expansion, ids: Array) -> LeafValues:
        legal = self._every[: len(ids)] if views.legal is None else views.legal
        priors, values, *actions = self.evaluate(views.obs, legal, ids)
        return LeafValues(np.ascontiguousarray(priors, np.float32), np.ascontiguousarray(values, np.float32), *actions)

    def _store_actions(self, trees: Array, nodes: Array, actions: Array) -> None:
        if self.actions is None:
            self.actions = np.zeros((*self.forest.prior.shape[:2], *actions.shape[1:]), actions.dtype)
        self.actions[trees, nodes] = actions

    def _find(self, t: int, edge: int, views: Views, row: int) -> int:
        """The node below a root edge with this observation that can be continued from, or NO_NODE."""
        forest = self.forest
        node = int(forest.child[t, 0, edge]) if forest.size[t] and edge >= 0 else NO_NODE
        while node != NO_NODE:
            seen = self.states.look(forest.state[t, node : node + 1])
            if not forest.flags[t, node] and _same(seen.obs, 0, views.obs, row):
                return node
            node = int(forest.sibling[t, node])
        return NO_NODE


def _same(one: Tree, row: int, other: Tree, at: int) -> bool:
    equal: list[bool] = []
    tree_map(lambda a, b: equal.append(a[row].tobytes() == b[at].tobytes()), one, other)
    return all(equal)


def _marks(steps: Expansion) -> Array:
    """A hash per row, equal for equal outcomes and the same in every process."""
    leaves: list[Array] = [np.stack([steps.reward, steps.terminated, steps.truncated, steps.to_play], 1)]
    tree_map(leaves.append, steps.obs if steps.legal is None else (steps.obs, steps.legal))
    rows = (b"".join(leaf[i].tobytes() for leaf in leaves) for i in range(len(steps.reward)))
    return np.array([int.from_bytes(blake2b(row, digest_size=8).digest(), "little", signed=True) for row in rows])
