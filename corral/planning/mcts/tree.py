"""Changes to trees: new roots, new nodes below the selected edges, backups, and moving the root."""

from __future__ import annotations

from typing import Any

from corral.core.jit import compiled
from corral.core.types import Array
from corral.planning.action_set import NO_EDGE
from corral.planning.mcts.forest import NO_NODE, TERMINAL, Forest, Wave


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


make_node: Any = compiled(_make_node)


def _plant(forest: Forest, trees: Array, states: Array, turns: Array, priors: Array, values: Array) -> None:
    """Write evaluated roots over the old trees."""
    for i in range(len(trees)):
        t = trees[i]
        make_node(forest, t, 0, states[i], turns[i], False, priors[i], values[i])
        forest.size[t] = forest.visits[t, 0] = 1
        forest.low[t] = forest.high[t] = values[i]
        forest.redraws[t] = forest.repeats[t] = 0


def _find_outcome(forest: Forest, t: int, node: int, edge: int, mark: int) -> int:
    """The outcome of an edge with this mark, or NO_NODE."""
    child: int = forest.child[t, node, edge]
    while child != NO_NODE and forest.mark[t, child] != mark:
        child = forest.sibling[t, child]
    return child


find_outcome: Any = compiled(_find_outcome)


def _expand(  # noqa: PLR0913 - what is known of every new node
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
        make_node(forest, t, new, states[i], turns[i], over, priors[i], value)
        states[i] = 0
        forest.parent[t, new], forest.in_edge[t, new] = node, edge
        forest.reward[t, new], forest.sibling[t, new] = rewards[i], forest.child[t, node, edge]
        if len(marks):
            forest.mark[t, new] = marks[i]
        forest.child[t, node, edge] = wave.new[i] = new


plant: Any = compiled(_plant, nogil=True)
expand: Any = compiled(_expand, nogil=True)


def _finish(forest: Forest, t: int, node: int, discount: float) -> None:
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


finish: Any = compiled(_finish, error_model="numpy")


def _start(forest: Forest, t: int, node: int, edge: int, count: int) -> None:
    """Count a simulation in flight to this edge; -1 uncounts it."""
    forest.inflight[t, node, edge] += count
    forest.pending[t, node] += count
    while node:
        edge, node = forest.in_edge[t, node], forest.parent[t, node]
        forest.inflight[t, node, edge] += count
        forest.pending[t, node] += count


start: Any = compiled(_start, error_model="numpy")


def _backup(forest: Forest, wave: Wave, discount: float, wanted: Array) -> None:
    """Back up simulations one by one; each that reached a node is one fewer that its tree wants."""
    for i in range(len(wave.tree)):
        t = wave.tree[i]
        start(forest, t, wave.node[i], wave.edge[i], -1)
        if wave.new[i] != NO_NODE:
            finish(forest, t, wave.new[i], discount)
            wanted[t] -= 1


backup: Any = compiled(_backup, nogil=True, error_model="numpy")


def _reroot(forest: Forest, t: int, node: int, most: int, moved: Array, gone: Array) -> int:
    """Make `node` the root and keep at most `most` nodes below it, the oldest first.

    `moved` is scratch space, one entry per node. States of removed nodes are put into `gone`, whose length is returned;
    the new root's state is among them, because the environment has its own by now.
    """
    size, kept, lost = forest.size[t], 0, 0
    for i in range(size):
        below = i == node or (i > node and moved[forest.parent[t, i]] != NO_NODE)
        if below and kept < most:
            moved[i] = kept
            kept += 1
        else:
            moved[i] = NO_NODE
        if i == node or moved[i] == NO_NODE:
            gone[lost] = forest.state[t, i]
            lost += 1
    for i in range(node, size):  # upwards: a place is read before it is overwritten
        new = moved[i]
        if new == NO_NODE:
            continue
        for a in range(forest.child.shape[2]):
            child = forest.child[t, i, a]
            while child != NO_NODE and moved[child] == NO_NODE:
                child = forest.sibling[t, child]
            forest.child[t, new, a] = NO_NODE if child == NO_NODE else moved[child]
            forest.prior[t, new, a], forest.total[t, new, a] = forest.prior[t, i, a], forest.total[t, i, a]
            forest.n[t, new, a], forest.inflight[t, new, a] = forest.n[t, i, a], 0
        sibling = forest.sibling[t, i]
        forest.sibling[t, new] = NO_NODE if sibling == NO_NODE else moved[sibling]
        forest.parent[t, new], forest.in_edge[t, new] = moved[forest.parent[t, i]] if new else 0, forest.in_edge[t, i]
        forest.visits[t, new], forest.pending[t, new] = forest.visits[t, i], 0
        forest.value[t, new], forest.reward[t, new] = forest.value[t, i], forest.reward[t, i]
        forest.to_play[t, new], forest.flags[t, new] = forest.to_play[t, i], forest.flags[t, i]
        forest.state[t, new], forest.draws[t, new] = forest.state[t, i], forest.draws[t, i]
        forest.mark[t, new] = forest.mark[t, i]
    forest.sibling[t, 0] = NO_NODE
    forest.size[t] = kept
    return lost


reroot: Any = compiled(_reroot, nogil=True)
