"""A search that its user calls, and what its user does in between."""

import gymnasium
import numpy as np
import pytest

import corral


class Blank(gymnasium.Env):
    """Looks the same whatever was done."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sum = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.sum += int(action)
        return np.zeros(1, np.float32), float(self.sum), False, False, {}


def as_advised(env, snapshots, advice, begin):
    env.step(int(advice))


def otherwise(env, snapshots, advice, begin):
    env.step(1 - advice)


def twice(env, snapshots, advice, begin):
    env.step(advice)
    env.step(advice)


def anew(env, snapshots, advice, begin):
    env.step(advice)
    env.reset()


def back(env, snapshots, advice, begin):
    env.step(advice)
    snapshots.load(begin)


@pytest.mark.parametrize("do", [as_advised, otherwise, twice, anew, back])
def test_a_search_goes_on_from_the_last_one_only_if_its_action_alone_was_taken(do):
    env, sims = Blank(), 12
    snapshots = corral.Snapshots(env)
    search = corral.Search(snapshots, sims=sims, reuse_tree=True, rollout_steps=2)
    env.reset(seed=0)
    begin = snapshots.save()
    for _ in range(3):
        do(env, snapshots, search(), begin)
        search()
        visits = int(search.planner.search.forest.n[0, 0].sum())
        assert visits > sims if do is as_advised else visits == sims
        env.reset()
