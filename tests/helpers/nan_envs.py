"""Environments whose numbers a run has to survive, or to give up on."""

import numpy as np

from corral.testing.envs import IdentityEnv


class HugeReward(IdentityEnv):
    """Finite as the environment says it, and not as a float32: from the `since`-th step of its life on."""

    def __init__(self, since=40, until=10**9, value=1e39, kind="discrete"):
        super().__init__(kind, length=10)
        self._since, self._until, self._value, self._life = since, until, value, 0

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self._life += 1
        return obs, self._value if self._since <= self._life < self._until else reward, terminated, truncated, info


class NanObservation(IdentityEnv):
    """Now and then an observation that is no number."""

    def __init__(self):
        super().__init__("box", length=10)
        self._life = 0

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self._life += 1
        return np.full_like(obs, np.nan) if self._life % 37 == 0 else obs, reward, terminated, truncated, info


class NanReward(IdentityEnv):
    """Now and then a reward that is no number."""

    def __init__(self):
        super().__init__("discrete", length=10)
        self._life = 0

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self._life += 1
        return obs, float("nan") if self._life % 37 == 0 else reward, terminated, truncated, info
