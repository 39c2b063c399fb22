"""Environments whose instances share state of the process, each in another way."""

import threading

import gymnasium
import numpy as np


class OwnState(gymnasium.Env):
    """A walk by dice with a state of its own."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(-1e9, 1e9, (2,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._x, self._t = float(self.np_random.normal()), 0
        return self._obs(), {}

    def step(self, action):
        self._x += float(action)
        self._t += 1
        return self._obs(), self._x, self._t >= 30, False, {}

    def _obs(self):
        return np.array([self._x, self._t])


class ClassDict(OwnState):
    """All instances write to one dict, and reset() empties it."""

    world = {"x": 0.0}  # noqa: RUF012 - that is the fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.world["x"] = self._x
        return self._obs(), {}

    def step(self, action):
        self.world["x"] += float(action) - 0.5
        self._x = self.world["x"]
        self._t += 1
        return self._obs(), self._x, self._t >= 30, False, {}


class DeclaredClassDict(ClassDict):
    """Says what its state is, the dict included."""

    def state_dict(self):
        return {"x": self._x, "t": self._t, "world": self.world["x"]}

    def load_state_dict(self, state):
        self._x, self._t, self.world["x"] = state["x"], state["t"], state["world"]


class PartlyDeclared(ClassDict):
    """Forgets the dict, so that nothing of what it declares repeats a walk."""

    def state_dict(self):
        return {"x": self._x, "t": self._t}

    def load_state_dict(self, state):
        self._x, self._t = state["x"], state["t"]


class LockedClassDict(ClassDict):
    """Is brought back by repeating its actions."""

    def __init__(self):
        super().__init__()
        self._lock = threading.Lock()


class ReadsWhatResetsWrite(OwnState):
    """A wind that the last reset of any instance has set."""

    wind = 0.0

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        type(self).wind = obs[0]
        return obs, info

    def step(self, action):
        self._x += self.wind
        return super().step(action)


LATE = {"count": 0}


class LateGlobal(OwnState):
    """Uses a global of its module from its ninth step on."""

    def step(self, action):
        if self._t >= 8:
            LATE["count"] += 1
            self._x += LATE["count"]
        return super().step(action)


class DefaultClient(gymnasium.Env):
    """PyBullet without a client of its own: the process has one that everybody uses."""

    def __init__(self):
        import pybullet

        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = gymnasium.spaces.Box(-5, 5, (1,), np.float64)
        if not pybullet.isConnected():
            pybullet.connect(pybullet.DIRECT)

    def reset(self, *, seed=None, options=None):
        import pybullet

        super().reset(seed=seed)
        pybullet.resetSimulation()
        ball = pybullet.createCollisionShape(pybullet.GEOM_SPHERE, radius=0.1)
        self._ball, self._t = pybullet.createMultiBody(1.0, ball, basePosition=[0, 0, self.np_random.random()]), 0
        return self._obs(), {}

    def step(self, action):
        import pybullet

        pybullet.applyExternalForce(self._ball, -1, [float(action[0]), 0, 0], [0, 0, 0], pybullet.WORLD_FRAME)
        pybullet.stepSimulation()
        self._t += 1
        obs = self._obs()
        return obs, float(obs[0]), self._t >= 50, False, {}

    def _obs(self):
        import pybullet

        return np.array(pybullet.getBasePositionAndOrientation(self._ball)[0])
