"""Environments that draw from generators that the whole process shares."""

import random
import threading

import gymnasium
import numpy as np
import pytest

import corral
from corral.core.errors import UserError
from corral.snapshot.rng import read_global_generators, same_state


class Common(gymnasium.Env):
    """Draws from a step on, and in resets."""

    def __init__(self, draw, first, lock=None):
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.draw, self.first, self.lock = draw, first, lock

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.draw(), 0
        return np.array([self.x]), {}

    def step(self, action):
        self.t += 1
        self.x += float(action) + (self.draw() if self.t >= self.first else 0.0)
        return np.array([self.x]), self.x, False, False, {}


def numpy_die():
    return np.random.normal()


def python_die():
    return random.random()


@pytest.mark.parametrize("lock", [None, threading.Lock()])
@pytest.mark.parametrize("first", [1, 8])
@pytest.mark.parametrize(("die", "name"), [(numpy_die, "numpy.random"), (python_die, "random")])
def test_env_drawing_from_global_rng_is_refused(die, name, first, lock):
    def plan_and_act():
        with corral.Snapshots(lambda: Common(die, first, lock)) as snapshots:
            snapshots.env.reset()
            for _ in range(10):
                before = read_global_generators()
                try:
                    snapshots.expand(snapshots.save(), 1)
                finally:
                    assert same_state(read_global_generators(), before)
                snapshots.env.step(1)

    with pytest.raises(UserError, match=rf"draws from the global generator {name}, .* use self.np_random"):
        plan_and_act()


def test_env_resetting_from_global_rng_is_unchanged():
    def run(plan):
        np.random.seed(3)
        env = Common(numpy_die, 1000)
        snapshots, seen = corral.Snapshots(env) if plan else None, []
        for _ in range(3):
            seen.append(env.reset()[0][0])
            if snapshots is not None:
                snapshots.expand(snapshots.save(), 1)
            seen.append(env.step(1)[1])
        return seen

    assert run(True) == run(False)
