"""CartPole that shows no velocities: whoever has no memory cannot balance the pole for long."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from corral.core.types import Array


class StatelessCartPole(gymnasium.ObservationWrapper[Array, Any, Array]):
    """CartPole-v1 whose observation is the cart's place and the pole's angle alone."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: Array) -> Array:
        return observation[[0, 2]]
