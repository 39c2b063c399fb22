"""Environments in the style of gym before 0.26, as people have them: without base class, spaces or seeds."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

import corral


class Walk:
    """Plain: `reset()` gives the observation, `step` four values. Ends at +-3, or by a time limit of `limit` steps."""

    def __init__(self, limit=5):
        self.limit, self.generator, self.closed = limit, np.random.default_rng(0), False

    def reset(self):
        self.t, self.x = 0, float(self.generator.integers(-1, 2))
        return np.array([self.x], np.float32)

    def step(self, action):
        self.t += 1
        self.x += 1.0 if action else -1.0
        cut = self.t >= self.limit
        done = abs(self.x) >= 3 or cut
        return np.array([self.x], np.float32), 1.0, done, {"TimeLimit.truncated": True} if cut else {}

    def close(self):
        self.closed = True


class SeededWalk(Walk):
    """With `seed()`, spaces of its own and `render(mode)`."""

    observation_space = spaces.Box(-10, 10, (1,), np.float32)
    action_space = spaces.Discrete(2)
    metadata = {"render.modes": ["rgb_array"], "video.frames_per_second": 7}  # noqa: RUF012 - gym's own convention

    def seed(self, seed=None):
        self.generator = np.random.default_rng(seed)

    def render(self, mode="human"):
        return np.zeros((4, 4, 3), np.uint8) if mode == "rgb_array" else None


class FiveValues(Walk):
    """Five values, and a `reset()` with an info but without a seed."""

    def reset(self):
        return super().reset(), {"start": True}

    def step(self, action):
        obs, reward, done, info = super().step(action)
        return obs, reward, done, False, info


WALK_SPACES = {"observation_space": SeededWalk.observation_space, "action_space": SeededWalk.action_space}
AdaptedWalk = corral.envs.old_gym(Walk, **WALK_SPACES)
