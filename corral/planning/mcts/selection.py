"""Selection: from the root down along the best edges, until one that nobody has followed or the end of an episode.

Several simulations of a tree may be on their way at once: each counts as a visit whose return is not known yet (Liu et
al. 2020, WU-UCT), so that the next goes elsewhere. With one at a time this is the sequential search.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from corral.compiled import compiled
from corral.planning.mcts.forest import NOWHERE, TERMINAL, Forest, Wave
from corral.planning.mcts.gumbel import Gumbel, gumbel_edge, gumbel_root_edge
from corral.planning.mcts.puct import Puct, puct_edge
from corral.types import Array


def _start(forest: Forest, t: int, node: int, edge: int) -> None:
    """Count a simulation that is on its way to this edge."""
    forest.pending[t, node] += 1
    if edge >= 0:
        forest.inflight[t, node, edge] += 1
    while node:
        edge, node = forest.in_edge[t, node], forest.parent[t, node]
        forest.inflight[t, node, edge] += 1
        forest.pending[t, node] += 1


start: Any = compiled(_start)


def _select_puct(forest: Forest, wanted: Array, leaves: int, rule: Puct, wave: Wave) -> int:
    """Start up to `leaves` simulations in each tree, at most as many as it wants; returns how many there are.

    A tree starts no more when it comes to an edge that another simulation is about to expand.
    """
    found = 0
    for t in range(len(wanted)):
        for _ in range(min(leaves, wanted[t])):
            node, edge = 0, -1
            while not forest.flags[t, node] & TERMINAL:
                edge = puct_edge(forest, t, node, rule)
                if forest.child[t, node, edge] == NOWHERE:
                    break
                node, edge = forest.child[t, node, edge], -1
            if edge >= 0 and forest.inflight[t, node, edge]:
                break
            start(forest, t, node, edge)
            wave.tree[found], wave.node[found], wave.edge[found] = t, node, edge
            found += 1
    return found


def _select_gumbel(forest: Forest, wanted: Array, leaves: int, rule: Gumbel, wave: Wave) -> int:
    """The same by Gumbel's rules; a tree also starts no more while no action is due at its root."""
    found, scores = 0, np.zeros(forest.prior.shape[2])
    for t in range(len(wanted)):
        for _ in range(min(leaves, wanted[t])):
            node, edge = 0, -1
            while not forest.flags[t, node] & TERMINAL:
                edge = gumbel_edge(forest, t, node, rule, scores) if node else gumbel_root_edge(forest, t, rule, scores)
                if edge < 0 or forest.child[t, node, edge] == NOWHERE:
                    break
                node, edge = forest.child[t, node, edge], -1
            open_end = not forest.flags[t, node] & TERMINAL
            if open_end and (edge < 0 or forest.inflight[t, node, edge]):
                break
            start(forest, t, node, edge)
            wave.tree[found], wave.node[found], wave.edge[found] = t, node, edge
            found += 1
    return found


select_puct: Any = compiled(_select_puct, nogil=True)
select_gumbel: Any = compiled(_select_gumbel, nogil=True)
