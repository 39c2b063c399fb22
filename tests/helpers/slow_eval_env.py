"""An environment that becomes slow, such as in evaluations, and leaves a mark when it does."""

import itertools
import time
from pathlib import Path

import gymnasium
import numpy as np

_SLOW_S = 3600.0


class SlowEval(gymnasium.Env):
    """Episodes of five steps. With `mark`, the file to write, `slow_in` hangs from this process's `slow_from`th reset.

    `slow_in=reset` sleeps an hour in it; `slow_in=episode` has episodes without end, of short steps.
    """

    _resets = itertools.count(1)

    def __init__(self, mark="", slow_in="", slow_from=1):
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._mark, self._slow_in, self._slow_from, self._t = mark, slow_in, slow_from, 0
        self._slow = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        self._slow = bool(self._mark) and next(self._resets) >= self._slow_from
        if self._slow:
            Path(self._mark).touch()
            if self._slow_in == "reset":
                time.sleep(_SLOW_S)
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        self._t += 1
        if self._slow:
            time.sleep(0.01)
        return np.zeros(2, np.float32), float(action), not self._slow and self._t >= 5, False, {}
