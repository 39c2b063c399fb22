"""Expansion: roots, and new nodes below the edges that selection found."""

from __future__ import annotations

from typing import Any

from corral.compiled import compiled
from corral.planning.mcts.forest import NOT_THERE, NOWHERE, TERMINAL, Forest, Wave
from corral.types import Array


def _make_node(forest: Forest, t: int, node: int, turn: int, over: bool, priors: Array, value: float) -> None:
    forest.visits[t, node] = forest.pending[t, node] = 0
    forest.to_play[t, node], forest.value[t, node] = turn, value
    forest.flags[t, node] = TERMINAL if over else 0
    for a in range(len(priors)):
        forest.child[t, node, a] = NOWHERE
        forest.prior[t, node, a] = NOT_THERE if over else priors[a]
        forest.n[t, node, a] = forest.inflight[t, node, a] = 0
        forest.total[t, node, a] = 0.0


make_node: Any = compiled(_make_node)


def _plant(forest: Forest, turns: Array, priors: Array, values: Array) -> None:
    """Roots with their evaluation, in place of whatever trees there were."""
    for t in range(len(values)):
        make_node(forest, t, 0, turns[t], False, priors[t], values[t])
        forest.size[t] = forest.visits[t, 0] = 1
        forest.low[t] = forest.high[t] = values[t]


def _reserve(forest: Forest, wave: Wave) -> None:
    """Number the nodes that simulations make; who came to the end of an episode makes none."""
    for i in range(len(wave.tree)):
        t = wave.tree[i]
        if wave.edge[i] < 0:
            wave.new[i] = wave.node[i]
        else:
            wave.new[i] = forest.size[t]
            forest.size[t] += 1


def _expand(
    forest: Forest, wave: Wave, rewards: Array, over: Array, turns: Array, priors: Array, values: Array
) -> None:
    """Make the nodes; rows are what became of each simulation's step, and what the evaluation says of it."""
    for i in range(len(wave.tree)):
        t, node, edge, new = wave.tree[i], wave.node[i], wave.edge[i], wave.new[i]
        if edge >= 0:
            make_node(forest, t, new, turns[i], over[i], priors[i], values[i])
            forest.parent[t, new], forest.in_edge[t, new] = node, edge
            forest.child[t, node, edge], forest.reward[t, node, edge] = new, rewards[i]


plant: Any = compiled(_plant, nogil=True)
reserve: Any = compiled(_reserve, nogil=True)
expand: Any = compiled(_expand, nogil=True)
