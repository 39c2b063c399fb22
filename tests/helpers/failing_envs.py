"""Environments that cannot be used, one for each way."""

from __future__ import annotations

import json
import sys
import time

import gymnasium
import numpy as np
from gymnasium import spaces

from corral.testing import CountingEnv


class NoLicence(CountingEnv):
    def __init__(self):
        raise OSError("no licence found")


class NoPackage(CountingEnv):
    def __init__(self):
        import a_package_that_is_missing  # noqa: F401


class NoBox2D(CountingEnv):
    def __init__(self):
        try:
            raise ModuleNotFoundError("No module named 'Box2D'", name="Box2D")
        except ImportError as error:
            raise gymnasium.error.DependencyNotInstalled("Box2D is not installed") from error


class BadReset(CountingEnv):
    def reset(self, **kwargs):
        return json.loads("{")  # fails in another package


class NoNumber(CountingEnv):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(-1, 1, (0,), np.float32)


class ManyActions(CountingEnv):
    def __init__(self):
        super().__init__()
        self.action_space = spaces.Discrete(1_000_000)


class Exits(CountingEnv):
    def __init__(self):
        sys.exit(0)


class LongReset(CountingEnv):
    """The first reset, or the one after `good` episodes, takes a minute."""

    def __init__(self, good=0):
        super().__init__(length=8)
        self.good = good

    def reset(self, **kwargs):
        if self.good == 0:
            time.sleep(60.0)
        self.good -= 1
        return super().reset(**kwargs)


class NoReward(CountingEnv):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, None, *rest
