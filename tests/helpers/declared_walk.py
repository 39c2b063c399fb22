"""An environment that says what its state is."""

import gymnasium
import numpy as np


class Declared(gymnasium.Env):
    """A walk whose next steps depend on a generator, with its whole or key state in its own hands."""

    def __init__(self, whole=True):
        self.observation_space = gymnasium.spaces.Box(-1e9, 1e9, (2,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(3)
        if whole:
            self.state_dict, self.load_state_dict = self._read, self._write
        else:
            self.get_key_state, self.set_key_state = self._read, self._write

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._x, self._t = 0.0, 0
        return self._obs(), {}

    def step(self, action):
        self._x += float(action) + self.np_random.normal()
        self._t += 1
        return self._obs(), self._x, self._t >= 12, False, {}

    def _obs(self):
        return np.array([self._x, self._t])

    def _read(self):
        return {"x": self._x, "t": self._t, "rng": self.np_random.bit_generator.state}

    def _write(self, state):
        self._x, self._t = state["x"], state["t"]
        self.np_random.bit_generator.state = state["rng"]


class Undeclared(Declared):
    """The same walk, which has to be copied."""

    def __init__(self):
        super().__init__()
        del self.state_dict, self.load_state_dict
