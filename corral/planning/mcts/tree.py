"""Expansion: roots, and new nodes below the edges that selection found."""

from __future__ import annotations

from typing import Any

from corral.core.jit import compiled
from corral.core.types import Array
from corral.planning.mcts.forest import NOT_THERE, NOWHERE, TERMINAL, Forest, Wave


def _make_node(
    forest: Forest, t: int, node: int, state: int, turn: int, over: bool, priors: Array, value: float
) -> None:
    forest.visits[t, node] = forest.pending[t, node] = 0
    forest.state[t, node], forest.sibling[t, node], forest.draws[t, node] = state, NOWHERE, 1
    forest.to_play[t, node], forest.value[t, node] = turn, value
    forest.flags[t, node] = TERMINAL if over else 0
    for a in range(len(priors)):
        forest.child[t, node, a] = NOWHERE
        forest.prior[t, node, a] = NOT_THERE if over else priors[a]
        forest.n[t, node, a] = forest.inflight[t, node, a] = 0
        forest.total[t, node, a] = 0.0


make_node: Any = compiled(_make_node)


def _plant(forest: Forest, trees: Array, states: Array, turns: Array, priors: Array, values: Array) -> None:
    """Roots with their evaluation, in place of whatever these trees were."""
    for i in range(len(trees)):
        t = trees[i]
        make_node(forest, t, 0, states[i], turns[i], False, priors[i], values[i])
        forest.size[t] = forest.visits[t, 0] = 1
        forest.low[t] = forest.high[t] = values[i]
        forest.throws[t] = forest.repeats[t] = 0


def _find_outcome(forest: Forest, t: int, node: int, edge: int, mark: int) -> int:
    """The outcome of an edge that has this mark, or NOWHERE."""
    child: int = forest.child[t, node, edge]
    while child != NOWHERE and forest.mark[t, child] != mark:
        child = forest.sibling[t, child]
    return child


find_outcome: Any = compiled(_find_outcome)


def _expand(  # noqa: PLR0913 - what is known of every new node
    forest: Forest, wave: Wave, states: Array, rewards: Array, terminated: Array, truncated: Array, turns: Array,
    priors: Array, values: Array, marks: Array,
) -> None:  # fmt: skip
    """Make the nodes; rows are what became of each simulation's step, and what the evaluation says of it.

    What the dice have shown before makes no new node: it is counted, and `follow` will send another simulation there,
    further down; this one comes to nothing. Without dice there are no marks, and every edge has one outcome.
    """
    for i in range(len(wave.tree)):
        t, node, edge = wave.tree[i], wave.node[i], wave.edge[i]
        if len(marks):
            known = find_outcome(forest, t, node, edge, marks[i])
            forest.throws[t] += forest.child[t, node, edge] != NOWHERE
            if known != NOWHERE:
                forest.draws[t, known] += 1
                forest.repeats[t] += 1
                wave.new[i] = known if forest.flags[t, known] & TERMINAL else NOWHERE
                continue
        new = forest.size[t]
        forest.size[t] += 1
        over, value = terminated[i] or truncated[i], 0.0 if terminated[i] else float(values[i])
        make_node(forest, t, new, states[i], turns[i], over, priors[i], value)
        forest.parent[t, new], forest.in_edge[t, new] = node, edge
        forest.reward[t, new], forest.sibling[t, new] = rewards[i], forest.child[t, node, edge]
        if len(marks):
            forest.mark[t, new] = marks[i]
        forest.child[t, node, edge] = wave.new[i] = new


plant: Any = compiled(_plant, nogil=True)
expand: Any = compiled(_expand, nogil=True)
