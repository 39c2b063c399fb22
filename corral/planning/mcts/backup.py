"""Backup: what simulations found goes up to the root, G <- r + gamma G, negated where the other player moves."""

from __future__ import annotations

from typing import Any

from corral.compiled import compiled
from corral.planning.mcts.forest import Forest, Wave


def _backup(forest: Forest, wave: Wave, discount: float) -> None:
    """One after the other, from the nodes that they made or ended in."""
    for i in range(len(wave.tree)):
        t, node = wave.tree[i], wave.new[i]
        result = float(forest.value[t, node])
        forest.visits[t, node] += 1
        if wave.edge[i] < 0:  # it was counted there, not only above
            forest.pending[t, node] -= 1
        while node:
            above, edge = forest.parent[t, node], forest.in_edge[t, node]
            if forest.to_play[t, above] != forest.to_play[t, node]:
                result = -result
            result = forest.reward[t, above, edge] + discount * result
            forest.n[t, above, edge] += 1
            forest.inflight[t, above, edge] -= 1
            forest.total[t, above, edge] += result
            forest.visits[t, above] += 1
            forest.pending[t, above] -= 1
            forest.low[t], forest.high[t] = min(forest.low[t], result), max(forest.high[t], result)
            node = above


backup: Any = compiled(_backup, nogil=True)
