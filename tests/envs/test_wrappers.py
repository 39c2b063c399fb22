import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from corral.core.errors import UserError
from corral.envs import wrappers
from corral.envs.suites.pixels import ReferenceLine, pixels


class Script(gymnasium.Env):
    """Frame t is filled with frames[t]; its reward is t; lives and the end are scripted too."""

    def __init__(self, frames, lives=None, reuse_buffer=False):
        self.observation_space = spaces.Box(0, 255, (2, 2), np.uint8)
        self.action_space = spaces.Discrete(3)
        self.frames, self.lives = frames, lives or [0] * len(frames)
        self.buffer = np.zeros((2, 2), np.uint8) if reuse_buffer else None
        self.t, self.resets, self.actions = 0, 0, []

    def get_action_meanings(self):
        return ["NOOP", "RIGHT", "FIRE"]

    def _observe(self):
        obs = np.zeros((2, 2), np.uint8) if self.buffer is None else self.buffer
        obs[:] = self.frames[self.t]
        return obs, {"lives": self.lives[self.t]}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.actions = 0, []
        self.resets += 1
        return self._observe()

    def step(self, action):
        self.t += 1
        self.actions.append(action)
        obs, info = self._observe()
        return obs, float(self.t), self.t == len(self.frames) - 1, False, info


def values(stack):
    return stack[:, 0, 0].tolist()


@pytest.mark.parametrize("reuse_buffer", [False, True])
def test_frame_stack_repeats_first_frame(reuse_buffer):
    env = wrappers.FrameStack(Script([10, 11, 12, 13], reuse_buffer=reuse_buffer), 3)
    first, _ = env.reset()
    assert env.observation_space.contains(first)
    assert values(first) == [10, 10, 10]
    seen = [env.step(0) for _ in range(3)]
    assert [values(step[0]) for step in seen] == [[10, 10, 11], [10, 11, 12], [11, 12, 13]]
    assert seen[-1][2]
    again, _ = env.reset()
    assert values(again) == [10, 10, 10]
    assert values(seen[-1][0]) == [11, 12, 13]  # the last observation did not change with the reset


def test_frame_stack_gives_arrays_away():
    env = wrappers.FrameStack(Script([10, 11, 12]), 2)
    env.reset()[0][:] = 77
    assert values(env.step(0)[0]) == [10, 11]


def test_frame_stack_refuses_other_spaces():
    with pytest.raises(UserError, match="Box"):
        wrappers.FrameStack(gymnasium.make("FrozenLake-v1"))


@pytest.mark.parametrize("reuse_buffer", [False, True])
def test_max_and_skip_shows_the_brighter_of_the_last_two_frames(reuse_buffer):
    env = wrappers.MaxAndSkip(Script([1, 9, 8, 7, 5, 4, 3, 2, 6, 0], reuse_buffer=reuse_buffer), 4)
    assert env.reset()[0][0, 0] == 1
    obs, reward, terminated, _, _ = env.step(1)
    assert (obs[0, 0], reward, terminated) == (7, 1 + 2 + 3 + 4, False)
    obs, reward, _, _, _ = env.step(1)
    assert (obs[0, 0], reward) == (6, 5 + 6 + 7 + 8)
    obs, reward, terminated, _, _ = env.step(1)  # ends at once: the frame before stays
    assert (obs[0, 0], reward, terminated) == (6, 9, True)
    assert env.unwrapped.actions == [1] * 9


def test_frame_skip_sums_rewards_and_raw_rewards():
    env = wrappers.FrameSkip(wrappers.ClipReward(Script([1, 9, 8, 7, 5])), 3)
    env.reset()
    obs, reward, _, _, info = env.step(0)
    assert (obs[0, 0], reward, info["raw_reward"]) == (7, 3.0, 1 + 2 + 3)


def test_lost_life_ends_episode_but_not_game():
    game = Script([0, 1, 2, 3, 4], lives=[2, 2, 1, 1, 0])
    env = wrappers.EpisodicLife(game)
    env.reset(seed=0)
    assert not env.step(0)[2]
    obs, _, terminated, truncated, info = env.step(0)
    assert (terminated, truncated, info["life_lost"]) == (True, False, True)
    following, _ = env.reset()
    np.testing.assert_array_equal(following, obs)  # the game stands still meanwhile
    assert (game.resets, game.t) == (1, 2)
    assert not env.step(0)[2]
    _, _, terminated, _, info = env.step(0)
    assert terminated
    assert "life_lost" not in info  # no life left: this is the end of the game
    env.reset()
    assert (game.resets, game.t) == (2, 0)


def test_a_seed_starts_a_new_game_even_after_a_lost_life():
    game = Script([0, 1, 2], lives=[2, 1, 1])
    env = wrappers.EpisodicLife(game)
    env.reset(seed=0)
    assert env.step(0)[2]
    env.reset(seed=1)
    assert (game.resets, game.t) == (2, 0)


def test_episodic_life_without_lives_is_refused():
    env = wrappers.EpisodicLife(gymnasium.make("CartPole-v1"))
    env.reset()
    with pytest.raises(UserError, match="lives"):
        env.step(0)


def test_clipping_keeps_the_first_raw_reward():
    env = wrappers.ClipReward(wrappers.ClipReward(Script([0, 0, 0, 0])))
    env.reset()
    env.step(0)
    _, reward, _, _, info = env.step(0)
    assert (reward, info["raw_reward"]) == (1.0, 2.0)


def test_fire_is_pressed_at_the_start_of_a_game():
    env = wrappers.FireReset(Script([0, 1, 2]))
    obs, _ = env.reset()
    assert obs[0, 0] == 1
    assert env.unwrapped.actions == [2]


def test_noops_are_random_bounded_and_seeded():
    env = wrappers.NoopReset(Script(list(range(40))), 30)
    counts = [int(env.reset(seed=seed)[0][0, 0]) for seed in range(300)]
    assert set(counts) == set(range(30))
    assert counts == [int(env.reset(seed=seed)[0][0, 0]) for seed in range(300)]
    assert len({int(env.reset()[0][0, 0]) for _ in range(50)}) > 10  # and fresh ones without a seed


def test_time_limits_can_be_removed_and_changed():
    def length(env):
        env.reset(seed=0)
        for t in range(1, 300):
            _, _, terminated, truncated, _ = env.step(np.zeros(1, np.float32))
            if terminated or truncated:
                return t
        return None

    env = gymnasium.wrappers.ClipAction(gymnasium.make("Pendulum-v1"))
    assert length(env) == 200
    shorter = wrappers.set_time_limit(env, 7)
    assert length(shorter) == 7
    assert shorter.spec.max_episode_steps == 7
    endless = wrappers.set_time_limit(shorter, None)
    assert length(endless) is None
    assert endless.spec.max_episode_steps is None
    assert gymnasium.spec("Pendulum-v1").max_episode_steps == 200  # the registry is not touched


def test_the_reference_line_lies_behind_things():
    class Drawing(Script):
        def _observe(self):
            frame = np.full((3, 5, 3), 255, np.uint8)
            frame[1] = 0
            return frame, {}

    frame, _ = ReferenceLine(Drawing([0, 0])).reset()
    assert frame[0, 2].tolist() == frame[2, 2].tolist() == [255, 0, 0]
    assert frame[1, 2].tolist() == [0, 0, 0]
    assert frame[0, 1].tolist() == [255, 255, 255]


def test_pixels_are_stacked_frames_of_any_rendered_environment():
    pytest.importorskip("pygame")
    plain = pixels("CartPole-v1", env_kwargs={"sutton_barto_reward": True})()
    lined = pixels("CartPole-v1", reference_line=True, grayscale=False, size=60, stack=2)()
    try:
        obs, _ = plain.reset(seed=0)
        assert plain.observation_space.shape == (4, 84, 84)
        assert plain.observation_space.contains(obs)
        assert (obs == obs[0]).all()
        stacks = [plain.step(1)[0] for _ in range(5)]
        assert all((new[:3] == old[1:]).all() for old, new in zip([obs, *stacks], stacks, strict=False))
        assert (stacks[-1][3] != obs[3]).any()
        obs, _ = lined.reset(seed=0)
        assert obs.shape == (2, 60, 60, 3)
        middle, beside = obs[0, 5, 28:32].astype(int), obs[0, 5, 10]
        assert beside.tolist() == [255, 255, 255]
        assert (middle[:, 0] - middle[:, 1]).max() > 50  # reddish
    finally:
        plain.close()
        lined.close()


def test_pixels_name_missing_packages():
    with pytest.raises(UserError, match="size"):
        pixels("CartPole-v1", size=0)
    with pytest.raises(UserError, match="rgb_array"):
        pixels(lambda render_mode: Script([0, 0]))()
    with pytest.raises(UserError, match="render_mode"):
        pixels(lambda: Script([0, 0]))()
    with pytest.raises(UserError, match="CartPole-v1"):
        pixels("CartPol-v1")()


@pytest.mark.parametrize("missing", ["pygame", "cv2"])
def test_pixels_name_the_package_they_lack(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=r"corral-rl\[pixels\]"):
        pixels("CartPole-v1")()
