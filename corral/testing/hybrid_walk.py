"""A walk whose steps are a choice and a number: a small task with hybrid actions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from corral.core.types import Array


class HybridWalk(gymnasium.Env[Array, Any]):
    """Go to the origin: a choice of the direction, and a number that says how far.

    One begins up to 3 away, steps are up to 1, and every one costs how far away it has led, for 8 steps. The best
    possible mean return is -5/6; whoever stands still gets -12.
    """

    limit, best_return = 8, -5 / 6

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-11.0, 11.0, (1,), np.float32)
        self.action_space = spaces.Dict({"far": spaces.Box(0.0, 1.0, (1,), np.float32), "sign": spaces.Discrete(2)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._x, self._t = float(self.np_random.uniform(-3, 3)), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._x += (1 if action["sign"] else -1) * float(action["far"][0])
        self._t += 1
        return self._observe(), -abs(self._x), False, self._t >= self.limit, {}

    def _observe(self) -> Array:
        return np.array([self._x], np.float32)
