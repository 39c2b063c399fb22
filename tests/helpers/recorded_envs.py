"""Environments that can or cannot continue in another process, and runs with a break."""

import copy
import json
import os
import random
from dataclasses import fields

import gymnasium
import numpy as np
from gymnasium import spaces

import corral

STEPS, PARTS = 13, 3


class WindyEnv(gymnasium.Env):
    """A walk that `np_random` pushes about, of an unforeseeable length."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at = self.np_random.normal(size=2)
        return self._at.copy(), {}

    def step(self, action):
        self._at += action + self.np_random.normal(size=2)
        return self._at.copy(), float(self._at.sum()), bool(self.np_random.random() < 0.1), False, {}


class UnseededEnv(WindyEnv):
    """Draws from a generator that no seed reaches."""

    def draw(self):
        return random.random()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at[0] += self.draw()
        return self._at.copy(), {}

    def step(self, action):
        _, *rest = super().step(action)
        self._at[0] += self.draw()
        return self._at.copy(), *rest


class ClockEnv(UnseededEnv):
    """Draws from the machine."""

    def draw(self):
        return int.from_bytes(os.urandom(4), "little") / 2**32


class DeclaringEnv(ClockEnv):
    """Cannot be replayed, and says its state."""

    def state_dict(self):
        return {"at": self._at.copy(), "generator": dict(self.np_random.bit_generator.state)}

    def load_state_dict(self, state):
        self._at = state["at"].copy()
        self.np_random.bit_generator.state = state["generator"]

    def draw(self):
        return 0.0 if self._at[1] < 0 else 1.0


class Draws:
    """Draws actions from the space, and remembers what it drew last, in two pieces."""

    def __init__(self, spec, seed=0):
        self._layout = spec.action
        self._space = copy.deepcopy(spec.action_space)
        self._space.seed(seed)
        import torch  # not above: workers import this file

        self._tensor = torch.as_tensor

    def initial_state(self, n):
        return {"count": np.zeros(n, np.int64), "more": (self._tensor(np.zeros((n, 2), np.float32)),)}

    def act(self, obs, state, first):
        rows = [self._layout.flatten(self._space.sample()) for _ in first]
        action = self._layout.unflatten([np.stack(leaf) for leaf in zip(*rows, strict=True)])
        count = np.where(first, 0, state["count"]) + 1
        more = self._tensor(state["more"][0]) + 0.1
        return action, {"count": count, "more": (more,)}, {"count": count, "more": more}


def through_a_file(state):
    """What a checkpoint does: arrays are kept, everything else becomes JSON."""
    arrays = []

    def put(node):
        if isinstance(node, dict):
            return {key: put(value) for key, value in node.items()}
        if isinstance(node, np.ndarray):
            arrays.append(node.copy())
            return {"$": len(arrays) - 1}
        return node

    text = json.dumps(put(state))
    return json.loads(text, object_hook=lambda node: arrays[node["$"]] if "$" in node else node)


def sample(sampler, count=PARTS):
    rollouts = sampler.rollouts(STEPS)
    return [next(rollouts) for _ in range(count)]


def make(env, backend="local", num_envs=5, **kwargs):
    vec = corral.make_vec(env, num_envs, backend, 2 if backend == "process" else None, seed=3, **kwargs)
    vec.record_episodes()
    return vec


def straight(make_vec, parts=2 * PARTS):
    with make_vec() as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        return sample(sampler, parts), sampler.episodes.state_dict()


def with_a_break(make_vec, breaks=1):
    """The same, but saved, closed and loaded after each `PARTS` trajectories; and who was restarted."""
    trajs, state, policy, restarted = [], None, None, []
    for _ in range(breaks + 1):
        with make_vec() as vec:
            policy = policy or Draws(vec.spec)
            sampler = corral.Sampler(vec, policy)
            if state is not None:
                restarted += sampler.load_state_dict(state)
            trajs += sample(sampler)
            state = through_a_file(sampler.state_dict())
    return trajs, sampler.episodes.state_dict(), restarted


def same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        np.testing.assert_array_equal(a, b)


def same_trajectories(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        for field in fields(x):
            same(getattr(x, field.name), getattr(y, field.name))
