"""Planners throw dice of their own, wherever an environment keeps its generators and whoever else has them."""

import copy
import threading
import types

import gymnasium
import numpy as np
import pytest

import corral
from corral.snapshot.find_rng import RngFinder, find_generators_in

SHARED = np.random.default_rng(0)
SHARED_SPACE = gymnasium.spaces.Discrete(1000)


class Thrower(gymnasium.Env):
    """Shows what its die shows; `throw` says where that is."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.last = 0.0
        self.build()

    def build(self):
        self.world = types.SimpleNamespace(parts=[{"rng": None}])

    def seed(self, seed):
        self.world.parts[0]["rng"] = np.random.default_rng(seed)

    def throw(self):
        return self.world.parts[0]["rng"].normal()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seed(seed)
        self.last = 0.0
        return np.zeros(1), {}

    def step(self, action):
        self.last = float(self.throw())
        return np.array([self.last]), self.last, False, False, {}


class Locked(Thrower):
    """Is brought back by repeating its actions."""

    def build(self):
        super().build()
        self.lock = threading.Lock()


class Declared(Thrower):
    def state_dict(self):
        return {"last": self.last, "rng": self.world.parts[0]["rng"].bit_generator.state}

    def load_state_dict(self, state):
        self.last = state["last"]
        self.seed(0)
        self.world.parts[0]["rng"].bit_generator.state = state["rng"]


class CopiesItself(Thrower):
    class World:
        def __deepcopy__(self, memo):
            made = type(self)()
            made.rng = copy.deepcopy(self.rng)
            return made

    def build(self):
        self.world = self.World()

    def seed(self, seed):
        self.world.rng = np.random.default_rng(seed)

    def throw(self):
        return self.world.rng.normal()


class Torch(Thrower):
    def build(self):
        self.torch = pytest.importorskip("torch")
        self.rng = self.torch.Generator()

    def seed(self, seed):
        self.rng.manual_seed(seed)

    def throw(self):
        return self.torch.rand(1, generator=self.rng, dtype=self.torch.float64).item()


class Shared(Thrower):
    """Others have its generator too."""

    def build(self):
        self.rng = SHARED

    def seed(self, seed):
        self.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state

    def throw(self):
        return self.rng.normal()


class SharedDeclared(Shared):
    def state_dict(self):
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]


class SharedSpace(Thrower):
    def build(self):
        self.noise = SHARED_SPACE

    def seed(self, seed):
        self.noise.seed(seed)

    def throw(self):
        return self.noise.sample() + self.np_random.random()


THROWERS = [Thrower, Locked, Declared, CopiesItself, Torch, Shared, SharedDeclared, SharedSpace]


@pytest.mark.parametrize("kind", THROWERS)
def test_a_planner_neither_knows_the_dice_nor_throws_them(kind):
    def run(env, plan=lambda: None):
        env.reset(seed=5)
        seen = []
        for _ in range(10):
            plan()
            seen.append(env.step(0)[1])
        return seen

    alone, planned = run(kind()), []
    with corral.Snapshots(kind) as snapshots:

        def plan():
            here = snapshots.save()
            steps = snapshots.expand([here] * 4, [0] * 4)
            planned.extend(steps.reward)
            snapshots.drop([here, *steps.children])

        assert run(snapshots.env, plan) == alone
        assert snapshots.stochastic
    assert len({*planned, *alone}) == 50


@pytest.mark.parametrize("kind", THROWERS)
def test_replayed_dice_are_those_of_the_state(kind):
    with corral.Snapshots(kind, rng="replay") as snapshots:
        snapshots.env.reset(seed=5)
        for _ in range(5):
            steps = snapshots.expand(snapshots.save(), 0)
            assert snapshots.env.step(0)[1] == steps.reward[0]


def test_a_die_that_comes_later_or_moves_is_found_again():
    env, dice = Thrower(), RngFinder()
    assert dice.read(env) == []
    env.reset(seed=0)
    for _ in range(3):
        dice.read(env)
    assert len(dice.read(env)) == 2
    env.world.parts.insert(0, {"rng": None})
    assert len(dice.read(env)) == 2


def test_dice_are_found_in_closures_slots_and_arrays_each_once():
    rng, slotted = np.random.default_rng(0), type("Slotted", (), {"__slots__": ("rng",)})()
    slotted.rng = np.random.RandomState(0)
    many = np.array([rng, None, slotted], object)
    assert find_generators_in({"f": lambda: many, "again": [rng], "method": rng.normal}) == [rng, slotted.rng]
