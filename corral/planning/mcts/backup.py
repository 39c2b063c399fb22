"""Backup: what simulations found goes up to the root, G <- r + gamma G, negated where the other player moves."""

from __future__ import annotations

from typing import Any

from corral.core.jit import compiled
from corral.core.types import Array
from corral.planning.mcts.forest import NOWHERE, Forest, Wave


def _finish(forest: Forest, t: int, node: int, discount: float) -> None:
    """A simulation has come to this node, of which the value is what there is to come."""
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
    """Count a simulation that is on its way to this edge, or with -1 one that is no more."""
    forest.inflight[t, node, edge] += count
    forest.pending[t, node] += count
    while node:
        edge, node = forest.in_edge[t, node], forest.parent[t, node]
        forest.inflight[t, node, edge] += count
        forest.pending[t, node] += count


start: Any = compiled(_start, error_model="numpy")


def _backup(forest: Forest, wave: Wave, discount: float, wanted: Array) -> None:
    """One after the other; each that came to a node is one that its tree wants no more."""
    for i in range(len(wave.tree)):
        t = wave.tree[i]
        start(forest, t, wave.node[i], wave.edge[i], -1)
        if wave.new[i] != NOWHERE:
            finish(forest, t, wave.new[i], discount)
            wanted[t] -= 1


backup: Any = compiled(_backup, nogil=True, error_model="numpy")
