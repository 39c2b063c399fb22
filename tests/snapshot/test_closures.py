"""Environments whose fields lead back to them: what is copied of them must lead to the copy."""

import functools
import random
import weakref

import gymnasium
import numpy as np
import pytest

import corral


class Sum(gymnasium.Env):
    """Adds up what `gain` says; how it gets at itself is what the others differ in."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(-1e9, 1e9, (1,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(3)
        self.total = 0.0
        self.bind()

    def bind(self):
        pass

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total = 0.0
        self.begin()
        return np.array([self.total]), {}

    def begin(self):
        pass

    def step(self, action):
        self.total += self.gain(int(action))
        return np.array([self.total]), self.total, False, False, {}


class ByLambda(Sum):
    def bind(self):
        self.gain = lambda action: 1 + action + self.total / 8

    def begin(self):
        self.gain(0)


class ByDefault(Sum):
    def bind(self):
        self.gain = lambda action, me=self: 1 + action + me.total / 8


class ByClosure(Sum):
    def bind(self):
        calls = 0

        def gain(action):
            nonlocal calls
            calls += 1
            return calls + action

        self.gain, self.clear = gain, lambda: None


class ByNativeMethod(Sum):
    def bind(self):
        self.past = []
        self.push = self.past.append

    def begin(self):
        self.past.clear()

    def gain(self, action):
        self.push(action + 1)
        return sum(self.past)


class ByWeakReference(Sum):
    def bind(self):
        self.me, self.proxy = weakref.ref(self), weakref.proxy(self)

    def gain(self, action):
        self.me().last = action
        return 1 + self.proxy.last + self.proxy.total / 8


class ByCache(Sum):
    def bind(self):
        self.seen = functools.lru_cache(self.count)

    def count(self, action):
        return action + self.total

    def gain(self, action):
        self.seen.cache_clear()
        return 1 + self.seen(action)


class ByDrawing(Sum):
    def bind(self):
        self.draw = random.Random(3).random

    def gain(self, action):
        return action + self.draw()


class ByOwnStep(Sum):
    def bind(self):
        self.step = self.quick

    def quick(self, action):
        self.total += 10 * int(action)
        return np.array([self.total]), self.total, False, False, {}


BOUND = [ByLambda, ByDefault, ByClosure, ByNativeMethod, ByWeakReference, ByCache, ByDrawing, ByOwnStep]
ACTIONS = [1, 0, 2, 2, 1, 0, 1, 2]


def follow(env, snapshots=None):
    """Rewards of a run, and of what planning said of each step before."""
    env.reset(seed=3)
    real, planned = [], []
    for action in ACTIONS:
        if snapshots is not None:
            here = snapshots.save()
            steps = snapshots.expand([here, here], [action, 0])
            planned.append(float(steps.reward[0]))
            snapshots.drop([here, *steps.children, *snapshots.expand(steps.children, [2, 1]).children])
        real.append(env.step(action)[1])
    return real, planned


@pytest.mark.parametrize("given", ["instance", "factory"])
@pytest.mark.parametrize("kind", BOUND)
def test_planning_reaches_only_its_own_environment(kind, given):
    alone, _ = follow(kind())
    env = kind()
    with corral.Snapshots(env if given == "instance" else kind, rng="replay") as snapshots:
        assert snapshots.level == corral.snapshot.states.Level.MEMORY
        real, planned = follow(snapshots.env, snapshots)
    assert real == planned == alone


def test_generator_reached_by_a_method_is_reseeded():
    with corral.Snapshots(ByDrawing) as snapshots:
        real, planned = follow(snapshots.env, snapshots)
    assert not set(real) & set(planned)
    assert snapshots.stochastic


class FirstReset(Sum):
    def bind(self):
        self.resets = 0
        self.begin = lambda: setattr(self, "resets", self.resets + 1)

    def gain(self, action):
        return action


def test_making_an_environment_to_plan_with_resets_no_other():
    env = FirstReset()
    env.reset(seed=0)
    with corral.Snapshots(env):
        assert env.resets == 1


def test_two_that_watch_an_environment_come_and_go_in_any_order():
    for first, second in ((0, 1), (1, 0)):
        env = ByOwnStep()
        own = env.step
        both = [corral.Snapshots(env), corral.Snapshots(env)]
        both[first].close()
        env.reset(seed=0)
        env.step(2)
        left = both[second]
        assert left.load(left.save()) == [20.0]
        left.close()
        assert env.step == own
        assert "reset" not in vars(env)
