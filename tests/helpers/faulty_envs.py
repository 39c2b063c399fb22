"""Environments that break the contract, each in one way."""

from __future__ import annotations

import os
import threading
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Good(gymnasium.Env):
    observation_space = spaces.Box(0, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length=7, start="random"):
        self.length, self.start = length, start

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.random(3, dtype=np.float32), {}

    def step(self, action):
        self.t += 1
        return self.np_random.random(3, dtype=np.float32), float(action), self.t >= self.length, False, {}


class NoStart(Good):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no licence")


class Truncating(Good):
    def step(self, action):
        obs, reward, over, _, info = super().step(action)
        return obs, reward, False, over, info


class OldStep(Good):
    def step(self, action):
        return super().step(action)[:4]


class OldReset(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class NoSeed(Good):
    def reset(self):
        return np.zeros(3, np.float32), {}


class Unseeded(Good):
    def reset(self, *, seed=None, options=None):
        self.np_random = np.random.default_rng()
        self.t = 0
        return self.np_random.random(3, dtype=np.float32), {}


class Leftover(Good):
    """Fresh ones agree, but a count survives the reset."""

    count = 0

    def step(self, action):
        self.count += 1
        _, *rest = super().step(action)
        return np.full(3, (self.count % 97) / 97, np.float32), *rest


class Reseeding(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=5 if seed is None else seed)


class Fixed(Good):
    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(3, self.t / self.length, np.float32), 0.0, self.t >= self.length, False, {}


class OutOfRange(Good):
    def step(self, action):
        obs, *rest = super().step(action)
        return obs + np.float32(3 * (self.t == 5)), *rest


class WrongShape(Good):
    def step(self, action):
        obs, *rest = super().step(action)
        return obs[:2], *rest


class WrongDtype(Good):
    def step(self, action):
        obs, *rest = super().step(action)
        return obs.astype(np.float64), *rest


class NotFinite(Good):
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def step(self, action):
        obs, *rest = super().step(action)
        obs[1] = np.nan if self.t == 4 else obs[1]
        return obs, *rest


class FailsAfter(Good):
    """Returns a NaN observation in every `steps`-th step; only Corral's checks notice."""

    def __init__(self, steps=100):
        super().__init__(length=10**9)
        self.steps = steps

    def step(self, action):
        obs, *rest = super().step(action)
        return (obs * np.nan if self.t % self.steps == 0 else obs), *rest


class NoReward(Good):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, None, *rest


class ArrayReward(Good):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward]), *rest


class InfiniteReward(Good):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float("inf"), *rest


class Endless(Good):
    def step(self, action):
        return *super().step(action)[:2], False, False, {}


class OneBuffer(Good):
    def __init__(self):
        super().__init__()
        self.buffer = np.zeros(3, np.float32)

    def step(self, action):
        obs, *rest = super().step(action)
        self.buffer[:] = obs
        return self.buffer, *rest


class Raising(Good):
    def step(self, action):
        if self.t == 5:
            raise ValueError("the joint exploded")
        return super().step(action)


class NotBuilt(Good):
    def __init__(self):
        raise RuntimeError("cannot find the simulator")


class Hanging(Good):
    def step(self, action):
        while True:
            time.sleep(0.05)


class Wordy(Good):
    observation_space = spaces.Text(5)


class Homesick(Good):
    """Depends on the process it is in."""

    def step(self, action):
        obs, *rest = super().step(action)
        obs[0] = os.getpid() % 10_007 / 10_007
        return obs, *rest


def not_an_env():
    return object()


class Locked(Good):
    def __init__(self):
        super().__init__(length=20)
        self.lock = threading.Lock()


class Forgetful(Good):
    """Declares a state without its generator."""

    def state_dict(self):
        return {"t": self.t}

    def load_state_dict(self, state):
        self.t = state["t"]


class Meddling(Good):
    """Shares its dice with all others."""

    dice = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            Meddling.dice = np.random.default_rng(seed)
        super().reset(seed=seed)
        return Meddling.dice.random(3, dtype=np.float32), {}

    def step(self, action):
        self.t += 1
        return Meddling.dice.random(3, dtype=np.float32), float(action), self.t >= self.length, False, {}


class DiesAtStart(gymnasium.Env):
    """Ends its process when it is built."""

    def __init__(self):
        os._exit(7)
