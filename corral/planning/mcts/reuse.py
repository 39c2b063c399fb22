"""Reuse: what a search found below the action that was taken is where the next search begins."""

from __future__ import annotations

from typing import Any

from corral.core.jit import compiled
from corral.core.types import Array
from corral.planning.mcts.forest import NOWHERE, Forest


def _reroot(forest: Forest, t: int, node: int, most: int, moved: Array, gone: Array) -> int:
    """Make `node` the root of its tree, and keep what is below it, up to `most` nodes, those that were made last going.

    `moved` has room for a number of every node; states of nodes that are not kept are put into `gone`, whose number is
    returned. The new root's state is among them: the environment has one of its own by now.
    """
    size, kept, lost = forest.size[t], 0, 0
    for i in range(size):
        below = i == node or (i > node and moved[forest.parent[t, i]] != NOWHERE)
        if below and kept < most:
            moved[i] = kept
            kept += 1
        else:
            moved[i] = NOWHERE
        if i == node or moved[i] == NOWHERE:
            gone[lost] = forest.state[t, i]
            lost += 1
    for i in range(node, size):  # upwards, since a place is only written to after it was read
        new = moved[i]
        if new == NOWHERE:
            continue
        for a in range(forest.child.shape[2]):
            child = forest.child[t, i, a]
            while child != NOWHERE and moved[child] == NOWHERE:
                child = forest.sibling[t, child]
            forest.child[t, new, a] = NOWHERE if child == NOWHERE else moved[child]
            forest.prior[t, new, a], forest.total[t, new, a] = forest.prior[t, i, a], forest.total[t, i, a]
            forest.n[t, new, a], forest.inflight[t, new, a] = forest.n[t, i, a], 0
        sibling = forest.sibling[t, i]
        forest.sibling[t, new] = NOWHERE if sibling == NOWHERE else moved[sibling]
        forest.parent[t, new], forest.in_edge[t, new] = moved[forest.parent[t, i]] if new else 0, forest.in_edge[t, i]
        forest.visits[t, new], forest.pending[t, new] = forest.visits[t, i], 0
        forest.value[t, new], forest.reward[t, new] = forest.value[t, i], forest.reward[t, i]
        forest.to_play[t, new], forest.flags[t, new] = forest.to_play[t, i], forest.flags[t, i]
        forest.state[t, new], forest.draws[t, new] = forest.state[t, i], forest.draws[t, i]
        forest.mark[t, new] = forest.mark[t, i]
    forest.sibling[t, 0] = NOWHERE
    forest.size[t] = kept
    return lost


reroot: Any = compiled(_reroot, nogil=True)
