from __future__ import annotations

import subprocess
import sys
import textwrap

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import corral
from corral.core.seeding import env_seeds
from corral.envs.wrappers import ClipReward, EpisodicLife
from corral.testing import CountingEnv, FaultyEnv, LivesEnv

sb3 = pytest.importorskip("stable_baselines3")
vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402


class CameraEnv(gymnasium.Env):
    """A small Dict observation, for MultiInputPolicy."""

    def __init__(self):
        self.observation_space = spaces.Dict(
            {
                "pixels": spaces.Box(0, 255, (36, 36, 1), np.uint8),
                "speed": spaces.Box(-1, 1, (2,), np.float32),
            }
        )
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def _obs(self):
        return {
            "pixels": self.np_random.integers(0, 256, (36, 36, 1), np.uint8),
            "speed": np.zeros(2, np.float32),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return self._obs(), {}

    def step(self, action):
        self._t += 1
        return self._obs(), float(-np.square(action).sum()), False, self._t >= 10, {}


class LeversEnv(gymnasium.Env):
    """A MultiBinary action space, whose policy in SB3 gives floats."""

    observation_space = spaces.Discrete(3)
    action_space = spaces.MultiBinary(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return 0, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self._t += 1
        return self._t % 3, float(action.sum()), self._t >= 8, False, {}


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Tiny networks are fastest on one thread, above all where cores are shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def counting(length, end="terminated"):
    return lambda: CountingEnv(length, end)


def test_steps_equal_sb3_vec_env():
    seed, rng = 11, np.random.default_rng(0)
    vec = corral.make_vec("CartPole-v1", 2, backend="local")
    ours, theirs = vec.as_sb3(), vec_env.DummyVecEnv([lambda: Monitor(gymnasium.make("CartPole-v1"))] * 2)
    ours.seed(seed)
    theirs._seeds = env_seeds(seed, "train", 2)
    np.testing.assert_array_equal(ours.reset(), theirs.reset())
    ends = 0
    for _ in range(120):
        actions = rng.integers(2, size=2)
        for a, b in zip(ours.step(actions)[:3], theirs.step(actions)[:3], strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    for _ in range(60):
        actions = rng.integers(2, size=2)
        *_, done, mine = ours.step(actions)
        *_, other = theirs.step(actions)
        for i in range(2):
            assert set(mine[i]) == set(other[i])
            assert mine[i]["TimeLimit.truncated"] == other[i]["TimeLimit.truncated"]
            if done[i]:
                ends += 1
                np.testing.assert_array_equal(mine[i]["terminal_observation"], other[i]["terminal_observation"])
                assert mine[i]["episode"]["r"] == other[i]["episode"]["r"]
                assert mine[i]["episode"]["l"] == other[i]["episode"]["l"]
    assert ends > 2
    ours.close()
    theirs.close()


@pytest.mark.parametrize(("end", "limited"), [("terminated", False), ("truncated", True), ("both", False)])
def test_only_a_pure_truncation_is_a_time_limit(end, limited):
    env = corral.make_vec(counting(3, end), 1, backend="local").as_sb3()
    env.reset()
    for _ in range(2):
        *_, done, infos = env.step(np.zeros(1, np.int64))
        assert not done[0]
        assert infos == [{"TimeLimit.truncated": False}]
    obs, _, done, infos = env.step(np.zeros(1, np.int64))
    assert done[0]
    assert infos[0]["TimeLimit.truncated"] is limited
    assert infos[0]["terminal_observation"][2] == 3
    assert obs[0, 2] == 0
    assert infos[0]["episode"]["r"] == 1 + 2 + 3
    assert infos[0]["episode"]["l"] == 3
    env.close()


def test_a_faulty_episode_is_not_in_the_statistics():
    vec = corral.make_vec([lambda: FaultyEnv("raise", at=3, every=2, length=5)], backend="local")
    env = vec.as_sb3()
    env.reset()
    episodes, faulty = [], 0
    for _ in range(60):
        *_, infos = env.step(np.zeros(1, np.int64))
        assert not ("faulty" in infos[0] and "episode" in infos[0])
        faulty += "faulty" in infos[0]
        if "episode" in infos[0]:
            episodes.append(infos[0]["episode"])
    assert faulty > 2
    assert episodes
    assert all((e["r"], e["l"]) == (15.0, 5) for e in episodes), "only whole episodes are reported"
    env.close()


def test_monitor_episode_is_the_game_not_the_life():
    def factory():
        return ClipReward(EpisodicLife(LivesEnv(length=4)))

    env = corral.make_vec(factory, 1, backend="local").as_sb3()
    env.reset()
    rewards, done, episodes = [], 0, []
    for _ in range(24):
        _, reward, over, infos = env.step(np.zeros(1, np.int64))
        rewards.append(float(reward[0]))
        done += int(over[0])
        episodes += [infos[0]["episode"]] if "episode" in infos[0] else []
    assert set(rewards) == {1.0, -1.0}
    assert done == 6
    assert [(e["r"], e["l"]) for e in episodes] == [(12.0, 12)] * 2, "six times 5 and -3"
    env.close()


@pytest.mark.parametrize("backend", ["local", "process"])
def test_ppo_trains_and_logs_the_episode_return(backend):
    env = corral.make_vec("CartPole-v1", 4, backend=backend, workers=2).as_sb3()
    model = sb3.PPO("MlpPolicy", env, n_steps=64, n_epochs=2, seed=0, device="cpu").learn(2048)
    assert len(model.ep_info_buffer) > 10
    assert all(info["r"] == info["l"] for info in model.ep_info_buffer)
    before = env.reset()
    mean, _ = evaluate_policy(model, env, n_eval_episodes=4)
    assert mean > 8
    assert before.shape == (4, 4)
    env.close()


def test_vecnormalize_and_framestack_wrap_it():
    env = corral.make_vec("CartPole-v1", 4, backend="process", workers=2).as_sb3()
    env = vec_env.VecFrameStack(vec_env.VecNormalize(env), 2)
    model = sb3.PPO("MlpPolicy", env, n_steps=64, n_epochs=2, seed=0, device="cpu").learn(1024)
    assert env.observation_space.shape == (8,)
    assert model.ep_info_buffer
    env.close()


def test_dict_observations_train_with_multi_input_policy():
    env = corral.make_vec(CameraEnv, 2, backend="local").as_sb3()
    model = sb3.PPO("MultiInputPolicy", env, n_steps=32, batch_size=32, n_epochs=1, device="cpu").learn(128)
    assert model.ep_info_buffer[0]["l"] == 10
    env.close()


def test_multibinary_actions_of_sb3_are_floats_and_still_fit():
    env = corral.make_vec(LeversEnv, 2, backend="local").as_sb3()
    sb3.PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, device="cpu").learn(64)
    env.close()


def test_seed_repeats_the_next_reset():
    with corral.make_vec("CartPole-v1", 3, backend="local", seed=4) as vec:
        env = vec.as_sb3()
        first, second = env.reset(), env.reset()
        assert not np.array_equal(first, second)
        assert env.seed(4) == [None] * 3
        np.testing.assert_array_equal(env.reset(), first)
        assert len({row.tobytes() for row in first}) == 3


def test_without_sb3_the_error_names_the_extra():
    code = textwrap.dedent("""
        import sys
        sys.modules["stable_baselines3"] = None
        import corral
        with corral.make_vec("CartPole-v1", 1, backend="local") as vec:
            try:
                vec.as_sb3()
            except corral.UserError as error:
                print(error)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'corral-rl[sb3]'" in done.stdout
