"""Several discrete choices as one: every combination is an action."""

from __future__ import annotations

import math

import numpy as np
from gymnasium import spaces as gs

from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.core.types import Array, Tree

_MOST = 4096


class JointChoices:
    """Numbers 0..n-1 for all combinations of a space's discrete choices, the last choice varying fastest."""

    def __init__(self, layout: Layout, who: str):
        for leaf in layout.leaves:
            if isinstance(leaf.space, gs.Box):
                raise UserError(
                    f"{who} needs discrete actions, and action leaf '{leaf.name}' is {leaf.space}; use ppo or a2c, "
                    "or make it discrete."
                )
        self._layout = layout
        self._sizes = [n for leaf in layout.leaves for n in _sizes(leaf.space)]
        self.count = math.prod(self._sizes)
        if self.count > _MOST:
            raise UserError(
                f"{who} values every combination of actions, and {layout.space} has {self.count}, more than {_MOST}; "
                "use ppo or a2c, or fewer choices."
            )

    def to_env(self, number: Array) -> Tree:
        """Numbers [n] as the environment's actions."""
        parts = np.stack(np.unravel_index(number, self._sizes), -1)  # [n, choices]
        leaves, at = [], 0
        for leaf in self._layout.leaves:
            width = int(np.prod(leaf.shape))
            start = np.asarray(getattr(leaf.space, "start", 0) if not isinstance(leaf.space, gs.MultiBinary) else 0)
            leaves.append((parts[:, at : at + width].reshape(-1, *leaf.shape) + start).astype(leaf.dtype))
            at += width
        return self._layout.unflatten(leaves)

    def from_env(self, action: Tree) -> Array:
        """The environment's actions as numbers [n]."""
        parts = []
        for leaf, value in zip(self._layout.leaves, self._layout.flatten(action), strict=True):
            start = np.asarray(getattr(leaf.space, "start", 0) if not isinstance(leaf.space, gs.MultiBinary) else 0)
            parts.append((value.astype(np.int64) - start).reshape(len(value), -1))
        joined = np.concatenate(parts, -1)
        number: Array = np.ravel_multi_index(tuple(joined.T), self._sizes)
        return number


def _sizes(space: gs.Space[object]) -> list[int]:
    if isinstance(space, gs.Discrete):
        return [int(space.n)]
    if isinstance(space, gs.MultiDiscrete):
        return [int(n) for n in space.nvec.reshape(-1)]
    assert isinstance(space, gs.MultiBinary)
    return [2] * int(np.prod(space.shape))
