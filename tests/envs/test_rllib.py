"""RLlib trains on Corral's environments, and sees in them what Gymnasium's own would show."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers.sims import Sim, free_url, wait_for

import corral
from corral.core.errors import UserError
from corral.envs.adapters.as_gymnasium import HeldRows
from corral.envs.rllib import SingleEnv, register
from corral.envs.wrappers import ClipReward
from corral.testing.envs import CountingEnv, TreeEnv

pytest.importorskip("ray.rllib")


@pytest.mark.parametrize("end", ["terminated", "mixed"])
def test_episodes_look_as_in_gymnasiums_next_step_mode(end):
    factory = partial(CountingEnv, 3, end)
    theirs = SyncVectorEnv([factory] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    ours = HeldRows(corral.make_vec(factory, 3, "local"))
    theirs.reset(seed=0)
    obs, _ = ours.reset(seed=0)
    assert (obs[:, 2] == 0).all()
    for _ in range(30):
        actions = np.zeros(3, np.int64)
        expected, actual = theirs.step(actions), ours.step(actions)
        np.testing.assert_array_equal(expected[0][:, 1:], actual[0][:, 1:])  # all but the seed
        for k in (1, 2, 3):
            np.testing.assert_array_equal(expected[k], actual[k])
    ours.close()


def test_envs_ending_at_different_times_miss_no_step():
    ours = HeldRows(corral.make_vec([partial(CountingEnv, n) for n in (2, 3, 5)], backend="local"))
    ours.reset(seed=1)
    lives = [0, 0, 0]
    waiting = [False] * 3
    for _ in range(40):
        obs, _, terminated, truncated, infos = ours.step(np.zeros(3, np.int64))
        for i in range(3):
            lives[i] += not waiting[i]
            assert obs[i, 3] == lives[i]
            assert (obs[i, 2] == 0) == waiting[i]
            waiting[i] = bool(terminated[i] or truncated[i])
            assert infos["game_over"][i] == waiting[i]
    ours.close()


def test_simulators_need_no_further_arguments():
    from ray.tune.registry import ENV_CREATOR, _global_registry

    url = free_url()
    sim = Sim(partial(CountingEnv, 3), url, bind=True)
    try:
        wait_for(url)
        register("simulated", url)
        env = _global_registry.get(ENV_CREATOR, "simulated")({"num_envs": 2})
        assert env.reset(seed=0)[0][:, 2].tolist() == [0, 0]
        assert env.step(np.zeros(2, np.int64))[0][:, 2].tolist() == [1, 1]
        env.close()
    finally:
        sim.end()


def test_a_single_environment_passes_gymnasiums_checks():
    from gymnasium.utils.env_checker import check_env

    for env in ("CartPole-v1", TreeEnv):
        single = SingleEnv(corral.make_vec(env, 1, "local"))
        check_env(single, skip_render_check=True)
        single.close()


def clipped_cartpole(**kwargs):
    return ClipReward(gymnasium.make("CartPole-v1", **kwargs))


@pytest.mark.parametrize(
    ("runners", "mode", "env"), [(1, "vector_entry_point", "CartPole-v1"), (0, "sync", clipped_cartpole)]
)
@pytest.mark.ray
def test_rllib_ppo_trains(runners, mode, env):
    from ray.rllib.algorithms.ppo import PPOConfig

    def play_episodes(runner):
        episodes = runner.sample(num_episodes=12, explore=True)
        return [(len(episode), episode.get_return(), episode.is_truncated) for episode in episodes]

    register("corral-cartpole", env)
    config = (
        PPOConfig()
        .environment("corral-cartpole", env_config={"max_episode_steps": 25})
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=3, gym_env_vectorize_mode=mode)
        .training(train_batch_size_per_learner=300, minibatch_size=100, num_epochs=2)
        .debugging(seed=0, log_level="ERROR")
    )
    algo = config.build_algo()
    try:
        for k in (1, 2):
            result = algo.train()
            assert result["env_runners"]["num_env_steps_sampled_lifetime"] >= 300 * k
            assert np.isfinite(result["learners"]["default_policy"]["policy_loss"])
        played = algo.env_runner_group.foreach_env_runner(play_episodes, local_env_runner=runners == 0)[0]
    finally:
        algo.stop()
    assert all(length == total for length, total, _ in played)  # a reward of 1 in each step, and none twice
    assert all((length == 25) == truncated for length, _, truncated in played)  # the limit came with env_config
    assert len({length for length, _, _ in played}) > 1


def test_options_of_rllib_are_refused():
    with pytest.raises(UserError, match=r"debugging\(seed"):
        register("x", "CartPole-v1", seed=3)
    with pytest.raises(UserError, match="num_envs_per_env_runner"):
        register("x", "CartPole-v1", num_envs=3)
    with pytest.raises(UserError, match="not list"):
        register("x", [CountingEnv])
