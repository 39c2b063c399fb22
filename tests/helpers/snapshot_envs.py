"""Environments whose states are hard to keep, each in another way."""

import random
import threading
from collections import deque

import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    """A walk by dice, in `length` steps at most."""

    def __init__(self, length=40):
        self.observation_space = gymnasium.spaces.Box(-1e9, 1e9, (2,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(3)
        self._length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._x, self._t = float(self.np_random.normal()), 0
        return self._obs(), {}

    def step(self, action):
        self._x += float(action) + self.np_random.normal()
        self._t += 1
        return self._obs(), self._x, self._t >= self._length, False, {}

    def _obs(self):
        return np.array([self._x, self._t])


class DeclaredWalk(Walk):
    """Says what its state is."""

    def state_dict(self):
        return {"x": self._x, "t": self._t, "rng": self.np_random.bit_generator.state}

    def load_state_dict(self, state):
        self._x, self._t = state["x"], state["t"]
        self.np_random.bit_generator.state = state["rng"]


class LockedWalk(Walk):
    """Holds what nothing can copy."""

    def __init__(self, length=40):
        super().__init__(length)
        self._lock = threading.Lock()


class Urn:
    """A part of an environment with dice of its own, and a way back to it."""

    def __init__(self, owner):
        self.owner, self.rng = owner, None

    def draw(self):
        return self.rng.normal() + self.owner.scale


class Entangled(gymnasium.Env):
    """Parts that share arrays, views, generators and each other."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(-1e9, 1e9, (6,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(3)
        self.scale, self.urn = 1.0, Urn(self)
        self.board = np.zeros((2, 3))
        self.row = self.board[1]  # written through
        self.tail, self.rule = deque(maxlen=4), self.slow
        self.parts = {"urn": self.urn, "boards": [self.board, self.board]}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None or self.urn.rng is None:
            self.urn.rng = np.random.default_rng(seed)
        self.board[:], self.t, self.scale = 0.0, 0, 1.0
        self.tail.clear()
        self.late = None
        return self.board.ravel().copy(), {}

    def slow(self):
        return self.urn.draw()

    def fast(self):
        return 2 * self.parts["urn"].draw() + self.np_random.random()

    def step(self, action):
        self.t += 1
        self.scale += 0.01 * action
        self.row += self.rule()
        self.parts["boards"][1][0] += self.row.sum() + sum(self.tail)
        self.tail.append(float(self.row[0]))
        self.rule = self.fast if self.t % 2 else self.slow
        if self.t == 5:
            del self.late
            self.early = np.arange(3)
        return self.board.ravel().copy(), float(self.row.sum()), self.t >= 25, False, {}


class SlotMachine(gymnasium.Env):
    """Pays 1 with probability 0.375, for ever; `kind` says where its dice are."""

    def __init__(self, kind="own"):
        self.observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._kind, self._lock = kind, threading.Lock() if kind == "locked" else None
        if kind == "declared":
            self.state_dict = lambda: {"rng": self.np_random.bit_generator.state}
            self.load_state_dict = lambda state: setattr(self.np_random.bit_generator, "state", state["rng"])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self._inner = {"deep": [random.Random(seed)]} if self._kind == "inner" else None
            self.action_space.seed(seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if self._kind == "space":
            won = sum(self.action_space.sample() for _ in range(4)) == 2
        else:
            won = (self.np_random if self._inner is None else self._inner["deep"][0]).random() < 0.375
        return np.full(1, won, np.float32), float(won), False, False, {}


class Bullet(gymnasium.Env):
    """Something in PyBullet that one joint's torque, or wheels, move."""

    body, wheels = "", ()

    def __init__(self):
        import pybullet
        import pybullet_data
        from pybullet_utils.bullet_client import BulletClient

        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (17,), np.float64)
        self.action_space = gymnasium.spaces.Box(-5, 5, (1,), np.float64)
        self.client = BulletClient(pybullet.DIRECT)
        self.client.setAdditionalSearchPath(pybullet_data.getDataPath())
        self.client.setGravity(0, 0, -9.8)
        if self.wheels:
            self.client.loadURDF("plane.urdf")
        self._id = self.client.loadURDF(self.body, [0, 0, 0.2])
        if not self.wheels:
            for joint in (0, 1):
                self.client.setJointMotorControl2(self._id, joint, pybullet.VELOCITY_CONTROL, force=0)
        self._torque, self._velocity = pybullet.TORQUE_CONTROL, pybullet.VELOCITY_CONTROL
        self._begin = self.client.saveState()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.client.restoreState(self._begin)
        self._t = 0
        return self._obs(), {}

    def step(self, action):
        for wheel in self.wheels:
            self.client.setJointMotorControl2(
                self._id, wheel, self._velocity, targetVelocity=float(action[0]), force=10
            )
        if not self.wheels:
            self.client.setJointMotorControl2(self._id, 0, self._torque, force=float(action[0]))
        self.client.stepSimulation()
        self._t += 1
        obs = self._obs()
        return obs, float(obs[0] + obs[13]), self._t >= 100, False, {}

    def close(self):
        self.client.disconnect()

    def _obs(self):
        place, turn = self.client.getBasePositionAndOrientation(self._id)
        joints = [self.client.getJointState(self._id, joint)[:2] for joint in (0, 1)]
        return np.array([*place, *turn, *sum(self.client.getBaseVelocity(self._id), ()), *sum(joints, ())])


class Pole(Bullet):
    """Touches nothing, so what follows a restored state is exact, which it declares."""

    metadata = {"deterministic": True}  # noqa: RUF012 - gymnasium's own convention
    body = "cartpole.urdf"


class Racecar(Bullet):
    """Drives on a plane; contacts are not restored exactly."""

    body, wheels = "racecar/racecar.urdf", (2, 3, 5, 7)
