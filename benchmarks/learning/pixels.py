"""Tasks from pixels with large returns and small differences between actions, to compare precisions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from corral.core.types import Array

_SIZE, _SQUARE = 84, 18


class MatchQuadrant(gymnasium.Env[Array, Any]):
    """Name the quadrant with the bright square: 1 for the right one, 0.5 for another, in each of `limit` steps.

    A bar shows the remaining steps, so that values depend on the picture alone. A random policy gets `0.625 * limit`.
    What an action changes, 0.5, is 1 or 2 % of the values: with 8 significant bits it would be lost in rounding.
    """

    limit = 20

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (_SIZE, _SIZE, 1), np.uint8)
        self.action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        reward = 1.0 if action == self._quadrant else 0.5
        self._t += 1
        return self._draw(), reward, self._t >= self.limit, False, {}

    def _draw(self) -> Array:
        half = _SIZE // 2
        self._quadrant = int(self.np_random.integers(4))
        down, right = self.np_random.integers(0, half - _SQUARE - 4, 2) + half * np.array(divmod(self._quadrant, 2))
        picture = np.zeros((_SIZE, _SIZE, 1), np.uint8)
        picture[down : down + _SQUARE, right : right + _SQUARE] = 255
        picture[-4:, : _SIZE - _SIZE * self._t // self.limit] = 128
        return picture


class MatchQuadrantLong(MatchQuadrant):
    """The same for 50 steps."""

    limit = 50
