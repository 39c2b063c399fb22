"""Changes to trees: new roots, new nodes below the selected edges, backups, and moving the root."""

from __future__ import annotations

from functools import partial

import numpy as np

from corral.core.jit import compiled
from corral.core.types import Array
from corral.planning.action_set import NO_EDGE
from corral.planning.mcts.forest import NO_NODE, TERMINAL, Forest, Wave


@compiled
def _make_node(
    forest: Forest, t: int, node: int, state: int, turn: int, over: bool, priors: Array, value: float
) -> None:
    forest.visits[t, node] = forest.pending[t, node] = 0
    forest.state[t, node], forest.sibling[t, node], forest.draws[t, node] = state, NO_NODE, 1
    forest.to_play[t, node], forest.value[t, node] = turn, value
    forest.flags[t, node] = TERMINAL if over else 0
    for a in range(len(priors)):
        forest.child[t, node, a] = NO_NODE
        forest.prior[t, node, a] = NO_EDGE if over else priors[a]
        forest.n[t, node, a] = forest.inflight[t, node, a] = 0
        forest.total[t, node, a] = 0.0


@partial(compiled, nogil=True)
def plant(forest: Forest, trees: Array, states: Array, turns: Array, priors: Array, values: Array) -> None:
    """Write evaluated roots over the old trees."""
    for i in range(len(trees)):
        t = trees[i]
        _make_node(forest, t, 0, states[i], turns[i], False, priors[i], values[i])
        forest.size[t] = forest.visits[t, 0] = 1
        forest.low[t] = forest.high[t] = values[i]
        forest.redraws[t] = forest.repeats[t] = 0


@compiled
def find_outcome(forest: Forest, t: int, node: int, edge: int, mark: int) -> int:
    """The outcome of an edge with this mark, or NO_NODE."""
    child: int = forest.child[t, node, edge]
    while child != NO_NODE and forest.mark[t, child] != mark:
        child = forest.sibling[t, child]
    return child


@partial(compiled, nogil=True)
def expand(  # noqa: PLR0913 - what is known of every new node
    forest: Forest, wave: Wave, states: Array, rewards: Array, terminated: Array, truncated: Array, turns: Array,
    priors: Array, values: Array, marks: Array,
) -> None:  # fmt: skip
    """Create the nodes; each row has the step and the evaluation of one simulation.

    A known outcome creates no node: it is counted, `follow` will send another simulation there, and this one ends
    without a result. Its node takes the new state, because outcomes that look alike may differ in what is hidden, and
    all steps from the first state would know that. `states` then holds those to drop, and 0 where a node was created.
    Deterministic steps have no marks, and every edge has one outcome.
    """
    for i in range(len(wave.tree)):
        t, node, edge = wave.tree[i], wave.node[i], wave.edge[i]
        if len(marks):
            known = find_outcome(forest, t, node, edge, marks[i])
            forest.redraws[t] += forest.child[t, node, edge] != NO_NODE
            if known != NO_NODE:
                forest.draws[t, known] += 1
                forest.repeats[t] += 1
                forest.state[t, known], states[i] = states[i], forest.state[t, known]
                wave.new[i] = known if forest.flags[t, known] & TERMINAL else NO_NODE
                continue
        new = forest.size[t]
        forest.size[t] += 1
        over, value = terminated[i] or truncated[i], 0.0 if terminated[i] else float(values[i])
        _make_node(forest, t, new, states[i], turns[i], over, priors[i], value)
        states[i] = 0
        forest.parent[t, new], forest.in_edge[t, new] = node, edge
        forest.reward[t, new], forest.sibling[t, new] = rewards[i], forest.child[t, node, edge]
        if len(marks):
            forest.mark[t, new] = marks[i]
        forest.child[t, node, edge] = wave.new[i] = new


@partial(compiled, error_model="numpy")
def finish(forest: Forest, t: int, node: int, discount: float) -> None:
    """Back up a simulation that ended at this node."""
    result = float(forest.value[t, node])
    forest.visits[t, node] += 1
    while node:
        above, edge = forest.parent[t, node], forest.in_edge[t, node]
        if forest.to_play[t, above] != forest.to_play[t, node]:
            result = -result
        result = forest.reward[t, node] + discount * result
        forest.n[t, above, edge] += 1
        forest.total[t, above, edge] += result
        forest.visits[t, above] += 1
        forest.low[t], forest.high[t] = min(forest.low[t], result), max(forest.high[t], result)
        node = above


@partial(compiled, error_model="numpy")
def start(forest: Forest, t: int, node: int, edge: int, count: int) -> None:
    """Count a simulation in flight to this edge; -1 uncounts it."""
    forest.inflight[t, node, edge] += count
    forest.pending[t, node] += count
    while node:
        edge, node = forest.in_edge[t, node], forest.parent[t, node]
        forest.inflight[t, node, edge] += count
        forest.pending[t, node] += count


@partial(compiled, nogil=True, error_model="numpy")
def backup(forest: Forest, wave: Wave, discount: float, wanted: Array) -> None:
    """Back up simulations one by one; each that reached a node is one fewer that its tree wants."""
    for i in range(len(wave.tree)):
        t = wave.tree[i]
        start(forest, t, wave.node[i], wave.edge[i], -1)
        if wave.new[i] != NO_NODE:
            finish(forest, t, wave.new[i], discount)
            wanted[t] -= 1


def reroot(forest: Forest, t: int, node: int, most: int) -> tuple[Array, Array]:
    """Make `node` the root and keep at most `most` nodes below it, the oldest first.

    Returns the old numbers of the nodes that stay, and the states to drop: those of removed nodes and of the new root,
    because the environment has its own by now.
    """
    size = int(forest.size[t])
    parent, sibling = forest.parent[t, :size].copy(), np.append(forest.sibling[t, :size], NO_NODE)
    below = np.arange(size) == node
    for i in range(node + 1, size):
        below[i] = below[parent[i]]
    kept = np.flatnonzero(below)[:most]
    moved = np.full(size + 1, NO_NODE, np.int32)  # the last one is read for NO_NODE
    moved[kept] = np.arange(len(kept))
    gone = forest.state[t, :size][moved[:size] <= 0]
    child = forest.child[t, kept]
    while (lost := (child != NO_NODE) & (moved[child] == NO_NODE)).any():
        child = np.where(lost, sibling[child], child)
    for array in forest:
        if array.ndim > 1:
            array[t, : len(kept)] = array[t, kept]
    new = slice(len(kept))
    forest.child[t, new], forest.sibling[t, new] = moved[child], moved[sibling[kept]]
    forest.parent[t, new] = moved[parent[kept]]
    forest.inflight[t, new] = forest.pending[t, new] = 0
    forest.parent[t, 0], forest.sibling[t, 0], forest.size[t] = 0, NO_NODE, len(kept)
    return kept, gone
