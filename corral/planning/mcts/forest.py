"""Many search trees as arrays that are made once: [tree, node] and [tree, node, edge].

Node 0 is a tree's root, and nodes come after their parents. A node has as many edges as there are actions to try; one
whose prior is not there is none. Where steps are random, an edge leads to several nodes, its outcomes: the newest is
its child, and each names the one before as its sibling. Values of a node are from the view of the player to
move there, of an edge and of a reward from that of the node above.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array

NOWHERE = -1  # as a child or a sibling: there is none
NOT_THERE = -1.0  # as a prior: no such action
TERMINAL = 1  # as a flag: nothing comes after this


class Forest(NamedTuple):
    """A tuple, because compiled functions take it as it is."""

    # nodes
    parent: Array  # int32
    in_edge: Array  # int32, the parent's edge that leads here
    visits: Array  # int32, simulations that made it or went through it
    pending: Array  # int32, simulations that are on their way through it
    value: Array  # float32, by the evaluation
    reward: Array  # float32, of the step that led here
    to_play: Array  # int8
    flags: Array  # uint8
    state: Array  # int64, the id of its state
    sibling: Array  # int32, the outcome of the same edge that came before
    draws: Array  # int32, how often this outcome was drawn
    mark: Array  # int64, equal where outcomes are
    # edges
    child: Array  # int32
    prior: Array  # float32
    n: Array  # int32, simulations that came back through it
    inflight: Array  # int16, simulations that are on their way through it
    total: Array  # float64, sum of the returns that came back
    # trees
    size: Array  # int32, nodes
    low: Array  # float64
    high: Array  # float64, least and greatest return that came back
    redraws: Array  # int32, draws below edges that had an outcome already
    repeats: Array  # int32, those that showed what was known

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for array in self)


def make_forest(trees: int, nodes: int, width: int) -> Forest:
    """Room for so many trees of so many nodes with so many edges each."""
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
    """Simulations that are on their way, one row each: expand this edge of this node of this tree.

    `new` is the node that a simulation comes to: one that it made, or one that was there; NOWHERE where it came to
    nothing.
    """

    tree: Array  # int64, as all of them
    node: Array
    edge: Array
    new: Array

    def first(self, count: int) -> Wave:
        """The first of them."""
        return Wave(self.tree[:count], self.node[:count], self.edge[:count], self.new[:count])


def make_wave(most: int) -> Wave:
    """Room for so many simulations."""
    return Wave(*(np.zeros(most, np.int64) for _ in range(4)))
