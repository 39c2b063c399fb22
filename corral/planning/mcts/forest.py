"""Many search trees as preallocated arrays: [tree, node] and [tree, node, edge].

Node 0 is the root of a tree, and nodes come after their parents. A node has one edge per action to try; an edge without
a prior does not exist. If steps are stochastic, an edge has several nodes as outcomes: the newest is its child, and
each outcome points to the previous one as its sibling. The value of a node is from the view of the player to move
there; values of edges and rewards are from the view of the parent node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array

NO_NODE = -1  # no child or no sibling
TERMINAL = 1  # flag: the episode ends here


class Forest(NamedTuple):
    """Arrays of all trees. A NamedTuple, so that numba functions accept it."""

    # nodes
    parent: Array  # int32
    in_edge: Array  # int32, the parent's edge to this node
    visits: Array  # int32, simulations that created or passed it
    pending: Array  # int32, simulations in flight through it
    value: Array  # float32, from the evaluation
    reward: Array  # float32, of the step to this node
    to_play: Array  # int8
    flags: Array  # uint8
    state: Array  # int64, id of its state
    sibling: Array  # int32, the previous outcome of the same edge
    draws: Array  # int32, how often this outcome was drawn
    mark: Array  # int64, equal for equal outcomes
    # edges
    child: Array  # int32
    prior: Array  # float32
    n: Array  # int32, finished simulations through it
    inflight: Array  # int16, simulations in flight through it
    total: Array  # float64, sum of their returns
    # trees
    size: Array  # int32, number of nodes
    low: Array  # float64
    high: Array  # float64, lowest and highest return so far
    redraws: Array  # int32, draws below edges that already had an outcome
    repeats: Array  # int32, those that gave a known outcome

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self)


def make_forest(trees: int, nodes: int, width: int) -> Forest:
    """Allocate a forest."""
    if min(trees, nodes, width) < 1:
        raise UserError(f"A search needs trees, nodes and actions, got {trees}, {nodes} and {width}.")

    def per_node(dtype: type) -> Array:
        return np.zeros((trees, nodes), dtype)

    def per_edge(dtype: type) -> Array:
        return np.zeros((trees, nodes, width), dtype)

    return Forest(
        parent=per_node(np.int32), in_edge=per_node(np.int32), visits=per_node(np.int32), pending=per_node(np.int32),
        value=per_node(np.float32), reward=per_node(np.float32), to_play=per_node(np.int8), flags=per_node(np.uint8),
        state=per_node(np.int64), sibling=per_node(np.int32), draws=per_node(np.int32), mark=per_node(np.int64),
        child=per_edge(np.int32), prior=per_edge(np.float32), n=per_edge(np.int32), inflight=per_edge(np.int16),
        total=per_edge(np.float64),
        size=np.zeros(trees, np.int32), low=np.zeros(trees), high=np.zeros(trees),
        redraws=np.zeros(trees, np.int32), repeats=np.zeros(trees, np.int32),
    )  # fmt: skip


class Wave(NamedTuple):
    """Simulations in flight, one row each. `new` is the node that a simulation reached, or NO_NODE."""

    tree: Array  # int64, like all fields
    node: Array
    edge: Array
    new: Array

    def first(self, count: int) -> Wave:
        return Wave(self.tree[:count], self.node[:count], self.edge[:count], self.new[:count])


def make_wave(most: int) -> Wave:
    """Allocate room for `most` simulations."""
    return Wave(*(np.zeros(most, np.int64) for _ in range(4)))
