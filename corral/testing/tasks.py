"""Small tasks: two with hybrid actions (a choice and a number), and CartPole without velocities."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from corral.core.types import Array


class MoveOrShoot(gymnasium.Env[Array, Any]):
    """Hit a target on a line: move until it is within range, then aim and shoot.

    Every action is `shoot`, yes or no, and `by`, from -1 to 1: a move goes `by` times 0.25 and costs 0.05; a shot lands
    `by` times 0.3 from the current position, ends the episode with 1 if it is within 0.05 of the target, and costs 0.1
    otherwise. Episodes are truncated after 20 steps. The best possible mean return is 0.907, the mean of `1 - 0.05 *
    moves`. A random policy gets -0.96; one that never moves hits a third of the targets.
    """

    step_size, reach, tolerance, limit = 0.25, 0.3, 0.05, 20
    best_return = 0.907

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-2.0, 2.0, (2,), np.float32)
        self.action_space = spaces.Dict({"by": spaces.Box(-1.0, 1.0, (1,), np.float32), "shoot": spaces.Discrete(2)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._target = self.np_random.uniform(-1.0, 1.0, 2)
        self._t = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        by = float(action["by"][0])
        self._t += 1
        hit, cost = False, 0.05
        if action["shoot"]:
            hit = abs(self._place + self.reach * by - self._target) <= self.tolerance
            cost = 0.1
        else:
            self._place = float(np.clip(self._place + self.step_size * by, -1.0, 1.0))
        return self._observe(), 1.0 if hit else -cost, hit, self._t >= self.limit and not hit, {}

    def _observe(self) -> Array:
        return np.array([self._target - self._place, self._place], np.float32)


class HybridWalk(gymnasium.Env[Array, Any]):
    """Go to the origin: a choice of the direction, and a number for the distance. It begins up to 3 away, steps are up
    to 1, and each of 8 steps costs the remaining distance. The best possible mean return is -5/6; standing still gets
    -12.
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


class StatelessCartPole(gymnasium.ObservationWrapper[Array, Any, Array]):
    """CartPole-v1 with only the cart's position and the pole's angle: a policy without recurrence fails soon."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: Array) -> Array:
        return observation[[0, 2]]
