"""Environments and samplers that go on in another process as if nothing had happened, and those that cannot."""

from functools import partial

import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from helpers.recorded_envs import (
    PARTS,
    DeclaringEnv,
    Draws,
    UnseededEnv,
    WindyEnv,
    make,
    same,
    same_trajectories,
    sample,
    straight,
    through_a_file,
    with_a_break,
)

import corral
from corral.envs.stepping import recorder as restore
from corral.envs.wrappers import ClipReward, EpisodicLife, NoopReset
from corral.testing import CountingEnv, LivesEnv, TreeEnv


class OwnGeneratorEnv(UnseededEnv):
    """Draws from a generator of its own, which no seed reaches, but which can be read."""

    def __init__(self):
        self._own = np.random.default_rng()

    def draw(self):
        return self._own.random()


class NewSpacesEnv(WindyEnv):
    """Makes new spaces in every reset and samples from them, as highway-env does."""

    def reset(self, *, seed=None, options=None):
        self.action_space = type(self)().action_space
        obs, info = super().reset(seed=seed)
        return obs, info | {"action": self.action_space.sample()}


def lives(length=4):
    return ClipReward(EpisodicLife(LivesEnv(length)))


def noops():
    return NoopReset(LivesEnv(20), 10)


def limited(cls):
    return TimeLimit(cls(), 17)


ENVS = {
    "CartPole-v1": "CartPole-v1",
    "Pendulum-v1": "Pendulum-v1",
    "FrozenLake-v1": "FrozenLake-v1",
    "np_random": WindyEnv,
    "counting": partial(CountingEnv, 5, "mixed"),
    "tree": TreeEnv,
    "new spaces": NewSpacesEnv,
    "lives": lives,
    "no-ops": noops,
    "time limit": partial(limited, WindyEnv),
    "declared": DeclaringEnv,
    "declared inside a time limit": partial(limited, DeclaringEnv),
}


IN_PROCESSES = ("CartPole-v1", "lives", "declared inside a time limit")  # the others in `make test-slow`


def on_backends():
    for name, env in ENVS.items():
        yield pytest.param(env, "local", id=f"{name}-local")
        marks = [] if name in IN_PROCESSES else pytest.mark.slow
        yield pytest.param(env, "process", id=f"{name}-process", marks=marks)


@pytest.mark.parametrize(("env", "backend"), list(on_backends()))
def test_a_run_with_a_break_is_the_same_run_bit_by_bit(env, backend):
    expected, episodes = straight(partial(make, env, backend))
    trajs, resumed_episodes, restarted = with_a_break(partial(make, env, backend))
    assert restarted == []
    same_trajectories(trajs, expected)
    same(resumed_episodes, episodes)


@pytest.mark.parametrize("backend", ["local", "process"])
def test_unseeded_generator_continues(backend):
    with make(OwnGeneratorEnv, backend) as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        state, policy = sampler.state_dict(), Draws(vec.spec, seed=1)
        sampler._policy = policy
        expected = sample(sampler)
    with make(OwnGeneratorEnv, backend) as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec, seed=1))
        assert sampler.load_state_dict(through_a_file(state)) == []
        same_trajectories(sample(sampler), expected)


def test_a_run_with_several_breaks_is_the_same_run():
    expected, episodes = straight(partial(make, "CartPole-v1"), 4 * PARTS)
    trajs, resumed_episodes, restarted = with_a_break(partial(make, "CartPole-v1"), breaks=3)
    assert restarted == []
    same_trajectories(trajs, expected)
    same(resumed_episodes, episodes)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", WindyEnv, TreeEnv])
def test_long_after_the_seed_the_current_game_alone_is_repeated(env, monkeypatch):
    monkeypatch.setattr(restore, "SINCE_SEED_STEPS", 0)
    expected, episodes = straight(partial(make, env))
    trajs, resumed_episodes, restarted = with_a_break(partial(make, env), breaks=1)
    assert restarted == []
    same_trajectories(trajs, expected)
    same(resumed_episodes, episodes)


def test_the_lives_of_one_game_are_repeated_together(monkeypatch):
    monkeypatch.setattr(restore, "SINCE_SEED_STEPS", 0)
    long_game = partial(lives, 20)  # of which no second one begins while we look
    expected, _ = straight(partial(make, long_game))
    trajs, _, restarted = with_a_break(partial(make, long_game))
    assert restarted == []
    assert trajs[PARTS - 1].obs[-1, 0, 2] > 20
    same_trajectories(trajs, expected)


def test_state_kept_between_episodes_is_detected(monkeypatch):
    monkeypatch.setattr(restore, "SINCE_SEED_STEPS", 0)
    *_, restarted = with_a_break(partial(make, partial(CountingEnv, 5)))
    assert restarted == [0, 1, 2, 3, 4]


def test_a_game_that_is_too_long_is_not_kept(monkeypatch):
    monkeypatch.setattr(restore, "GAME_STEPS", 20)
    with make("Pendulum-v1") as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        assert sampler.state_dict()["vec"]["envs"] == {}
    assert with_a_break(partial(make, "Pendulum-v1"))[2] == [0, 1, 2, 3, 4]
