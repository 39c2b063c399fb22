"""A game for the eyes."""

import gymnasium
import numpy as np
from gymnasium import spaces


class FollowTheSpot(gymnasium.Env):
    """A bright spot is on the left or on the right of the screen: say where. Shows its last four frames."""

    def __init__(self, size=36, length=16):
        self.observation_space = spaces.Box(0, 255, (4, size, size), np.uint8)
        self.action_space = spaces.Discrete(2)
        self._size, self._length = size, length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        self._frames = np.zeros(self.observation_space.shape, np.uint8)
        return self._look(), {}

    def step(self, action):
        reward = float(int(action) == self._side)
        self._t += 1
        return self._look(), reward, False, self._t >= self._length, {}

    def _look(self):
        self._side = int(self.np_random.integers(2))
        frame = self.np_random.integers(0, 60, (self._size, self._size), dtype=np.uint8)
        middle = self._size // 2
        left = middle + 2 if self._side else 2
        frame[middle - 6 : middle + 6, left : left + 12] = 255
        self._frames = np.concatenate([self._frames[1:], frame[None]])
        return self._frames.copy()
