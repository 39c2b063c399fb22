"""A factory that returns one environment object again and again: it cannot be two rows of a batch."""

import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from helpers.on_runtimes import RAY_BACKEND
from helpers.sims import free_url

import corral
from corral.core.errors import UserError
from corral.envs.serve.server import SimulatorServer
from corral.link.address import parse_url
from corral.link.transports.open import open_binding
from corral.testing import CountingEnv, FaultyEnv
from corral.testing.contracts.vec_env import T
from corral.testing.play import play

IN_USE = "already in use.*return a new one from every call"
BACKENDS = ["local", "process", pytest.param("ray", marks=RAY_BACKEND)]


def wrapped(env):
    return TimeLimit(env, 9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrap", [lambda env: env, wrapped], ids=["bare", "wrapped"])
def test_one_env_object_for_several_rows_is_refused(backend, wrap):
    env = CountingEnv()
    with pytest.raises(UserError, match=IN_USE):
        corral.make_vec(lambda: wrap(env), 4, backend, workers=2)


def test_one_env_object_in_a_list_of_factories_is_refused():
    env = CountingEnv()
    with pytest.raises(UserError, match=IN_USE):
        corral.make_vec([lambda: env, CountingEnv, lambda: wrapped(env)], backend="local")


def test_sampler_refuses_one_env_object_for_several_rows():
    env = CountingEnv()
    with pytest.raises(UserError, match=IN_USE):
        corral.Sampler(lambda: env, policy=lambda obs: np.zeros(len(obs), np.int64), num_envs=2, backend="local")


def test_served_env_object_for_several_slots_is_refused():
    env, binding = CountingEnv(), open_binding("tcp", listen=parse_url(free_url("tcp")))
    try:
        with pytest.raises(UserError, match=IN_USE):
            SimulatorServer(lambda: env, "counting", binding, 2)
        SimulatorServer(lambda: env, "counting", binding, 1)
    finally:
        binding.close()


def test_evaluation_refuses_the_env_object_of_training(tmp_path):
    env = CountingEnv()
    with pytest.raises(UserError, match=IN_USE):
        corral.train(
            "ppo", env=lambda: env, steps=64, num_envs=1, eval_episodes=1, backend="local", run_dir=tmp_path / "run"
        )  # fmt: skip


def test_env_object_of_a_closed_or_dropped_vec_env_can_be_used():
    env = CountingEnv()
    with corral.make_vec(lambda: env, 1, "local"):
        pass
    corral.make_vec(lambda: env, 1, "local").recv()  # dropped without being closed
    with corral.make_vec(lambda: env, 1, "local") as vec:
        assert vec.recv().obs[0, T] == 0


def test_planning_refuses_the_acting_env_object_as_scratch():
    env = CountingEnv()
    with corral.make_vec(lambda: env, 1, "local") as vec:
        vec.recv()
        with pytest.raises(UserError, match=IN_USE):
            vec.states()
    with pytest.raises(UserError, match=IN_USE):
        corral.Snapshots(lambda: env)


def test_rebuild_may_return_the_failed_env_object_again():
    env = FaultyEnv("raise")
    with corral.make_vec(lambda: env, 1, "local") as vec:
        vec.recv()
        faulty, times = [], []
        for _ in range(10):
            vec.send(np.array([0]), np.array([0]))
            batch = vec.recv()
            faulty.append(bool(batch.faulty[0]))
            times.append(int(batch.obs[0, T]))
    assert faulty == [False] * 7 + [True] + [False] * 2
    assert times == [1, 2, 3, 4, 0, 1, 2, 0, 1, 2]


def test_rebuild_with_the_env_object_of_another_row_is_refused():
    pool = [FaultyEnv("raise"), CountingEnv(), CountingEnv()]
    handed_out = iter([pool[0], pool[1], pool[1], pool[2]])
    with corral.make_vec(lambda: next(handed_out), 2, "local") as vec, pytest.raises(UserError, match=IN_USE):
        play(vec, 10)
