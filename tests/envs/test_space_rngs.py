"""Samples of a VecEnv's spaces: they repeat, and are the same on every backend."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers.on_runtimes import RAY_BACKEND
from helpers.sims import Sim, free_url, wait_for

import corral
from corral.testing import CountingEnv

BACKENDS = ["process", pytest.param("ray", marks=RAY_BACKEND)]


class Nested(CountingEnv):
    """Seeds its spaces, as CleanRL's factories do, unless `seed` is None."""

    def __init__(self, seed=None, bits=None):
        super().__init__()
        gears = spaces.MultiDiscrete([3, 4], start=[1, 0])
        self.action_space = spaces.Tuple(
            [spaces.Discrete(99), spaces.Dict(gears=gears, throttle=spaces.Box(-1, 1, (3,)), on=spaces.MultiBinary(9))]
        )
        if seed is not None:
            self.action_space.seed(seed)
            self.observation_space.seed(seed)
        if bits is not None:
            self.action_space[0]._np_random = np.random.Generator(bits(seed))


def samples(env, backend, seed=0, workers=2):
    with corral.make_vec(env, 3, backend, workers, seed) as vec:
        venv = vec.as_gymnasium()
        drawn = (venv.action_space, venv.single_action_space, venv.observation_space, vec.spec.observation_space)
        return [repr(space.sample()) for space in drawn for _ in range(5)]


@pytest.mark.parametrize("backend", ["process", pytest.param("ray", marks=[*RAY_BACKEND, pytest.mark.slow])])
@pytest.mark.parametrize("bits", [None, np.random.MT19937, pytest.param(np.random.SFC64, marks=pytest.mark.slow)])
def test_spaces_keep_the_seed_that_the_env_gave_them(backend, bits):
    expected = samples(lambda: Nested(4, bits), "local")
    assert samples(lambda: Nested(4, bits), backend) == expected
    assert samples(lambda: Nested(5, bits), backend) != expected


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_same_env_seeds_give_same_action_samples(env_id):
    """Gymnasium's test_sync_vector_determinism, in worker processes."""

    def make():
        env = gymnasium.make(env_id)
        env.action_space.seed(123)
        return env

    first, second = ([make] * 3 for _ in range(2))
    with corral.make_vec(first, backend="process") as a, corral.make_vec(second, backend="process") as b:
        spaces_of = a.as_gymnasium().action_space, b.as_gymnasium().action_space
        assert spaces_of[0].np_random.bit_generator.state == spaces_of[1].np_random.bit_generator.state
        for _ in range(100):
            np.testing.assert_array_equal(*(space.sample() for space in spaces_of))


@pytest.mark.parametrize("backend", BACKENDS)
def test_unseeded_spaces_get_their_seed_from_make_vec(backend):
    expected = samples(Nested, "local", seed=3)
    assert samples(Nested, "local", seed=3) == expected
    assert samples(Nested, backend, seed=3) == expected
    assert samples(Nested, backend, seed=4) != expected


def test_spaces_of_a_simulator_get_their_seed_from_make_vec():
    url = free_url()
    sim = Sim(Nested, url, bind=True)
    try:
        wait_for(url)
        assert samples(url, "auto", seed=3, workers=1) == samples(Nested, "local", seed=3)
    finally:
        sim.end()


def test_sampling_from_the_spec_leaves_the_env_alone():
    with corral.make_vec(lambda: Nested(4), 1, "local") as vec:
        before = repr(vec.environment(0).action_space[0].np_random.bit_generator.state)
        vec.spec.action_space.sample()
        assert repr(vec.environment(0).action_space[0].np_random.bit_generator.state) == before
