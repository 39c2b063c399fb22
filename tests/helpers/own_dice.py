"""Guessing games whose dice a planner cannot reseed: whoever knows their state wins always, all others one in five."""

import gymnasium
import numpy as np


class Guess(gymnasium.Env):
    """Pays 1 for the number that its dice, a generator of its own, show next; nothing is to be seen."""

    def __init__(self, steps=20):
        self.observation_space = gymnasium.spaces.Box(0, steps, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(5)
        self._steps, self._dice = steps, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._dice, self._t = int(self.np_random.integers(2**31)), 0
        return self._obs(), {}

    def step(self, action):
        won = int(action) == self._throw()
        self._t += 1
        return self._obs(), float(won), self._t >= self._steps, False, {}

    def _throw(self):
        self._dice = (1103515245 * self._dice + 12345) % 2**31
        return (self._dice >> 16) % 5

    def _obs(self):
        return np.array([self._t], np.float32)


class DeclaredGuess(Guess):
    """Declares its state, the dice included."""

    def state_dict(self):
        return {"dice": self._dice, "t": self._t}

    def load_state_dict(self, state):
        self._dice, self._t = state["dice"], state["t"]


class ReseededGuess(DeclaredGuess):
    """And lets a planner have other numbers."""

    def reseed(self, seed):
        self._dice = seed % 2**31


class HonestGuess(Guess):
    """Draws from `np_random`, which every planner reseeds."""

    def _throw(self):
        return int(self.np_random.integers(5))
