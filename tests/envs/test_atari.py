import pickle
import subprocess
import sys

import numpy as np
import pytest

import corral
from corral.core.errors import UserError
from corral.envs.backends.native.ale import AleVecEnv
from corral.envs.suites import atari

pytest.importorskip("ale_py")
pytest.importorskip("cv2")

FIELDS = ("env_ids", "obs", "reward", "raw_reward", "terminated", "truncated", "first", "faulty", "game_over")


@pytest.mark.parametrize(
    ("game", "steps", "options"),
    [
        ("Pong", 1000, {}),
        ("Breakout", 600, {}),
        ("Breakout", 500, {"max_frames": 333, "stack": 3, "size": 42, "clip_reward": False, "noop_max": 0}),
        ("Breakout", 500, {"episodic_life": False, "fire_reset": False, "frame_skip": 3}),
        ("Seaquest", 150, {"sticky": 0.25, "max_frames": 9, "stack": 5}),  # episodes shorter than the stack
    ],
)
def test_the_python_stack_and_the_native_one_agree_exactly(game, steps, options):
    suite, num_envs = atari(game, **options), 2
    rng = np.random.default_rng(0)
    ends = games = raw = 0
    with (
        corral.make_vec(suite, num_envs, "local", seed=3) as python,
        corral.make_vec(suite, num_envs, "native", seed=3) as native,
    ):
        assert isinstance(native, AleVecEnv)
        assert python.spec.observation == native.spec.observation
        assert python.spec.action == native.spec.action
        for _ in range(steps):
            a, b = python.recv(), native.recv()
            for name in FIELDS:
                left, right = getattr(a, name), getattr(b, name)
                assert left.dtype == right.dtype
                np.testing.assert_array_equal(left, right, name)
            np.testing.assert_array_equal(a.next_obs, b.next_obs)
            assert (a.final_obs is None) == (b.final_obs is None)
            ends += int((a.terminated | a.truncated).sum())
            games += int(a.game_over.sum())
            raw += int(np.abs(a.raw_reward).sum())
            actions = rng.integers(0, python.spec.action_space.n, num_envs)
            python.send(a.env_ids, actions)
            native.send(b.env_ids, actions)
    assert games > 0
    assert raw > 0 or "max_frames" in options
    assert (ends > games) == (game == "Breakout" and options.get("episodic_life", True))


def test_first_frame_fills_stack_after_lost_life():
    with corral.make_vec(atari("Breakout"), 2, "native") as vec:
        batch = vec.recv()
        lives = 0
        for t in range(200):
            assert (batch.obs[batch.first] == batch.obs[batch.first][:, :1]).all()
            lost = batch.terminated & ~batch.game_over
            if lost.any():
                lives += 1
                final, following = batch.final_obs[lost], batch.obs[lost]
                np.testing.assert_array_equal(final[:, -1], following[:, -1])
                assert (final[:, 0] != final[:, -1]).any()
            vec.send(batch.env_ids, np.full(2, t % 4))
            batch = vec.recv()
        assert lives > 2


def test_raw_rewards_are_the_games_own():
    with corral.make_vec(atari("Seaquest"), 2, "native") as vec:
        batch, rng = vec.recv(), np.random.default_rng(0)
        pairs = set()
        for _ in range(400):
            vec.send(batch.env_ids, rng.integers(0, 18, 2))
            batch = vec.recv()
            pairs |= set(zip(batch.reward.tolist(), batch.raw_reward.tolist(), strict=True))
    assert pairs == {(0.0, 0.0), (1.0, 20.0)}


def test_the_suite_travels_to_worker_processes():
    suite = atari("Pong", size=42)
    assert pickle.loads(pickle.dumps(suite)) == suite
    with (
        corral.make_vec(suite, 3, "process", workers=2, seed=5) as far,
        corral.make_vec(suite, 3, seed=5) as near,
    ):
        assert "native" in near.backend_reason
        np.testing.assert_array_equal(far.recv().obs, near.recv().obs)


def test_a_suite_that_shall_render_runs_in_python():
    suite = atari("Pong")
    env = suite(render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (210, 160, 3)
    env.close()
    with corral.make_vec(suite, 1, env_kwargs={"render_mode": "rgb_array"}) as vec:
        assert not isinstance(vec, AleVecEnv)
    with pytest.raises(UserError, match="env_kwargs"):
        corral.make_vec(suite, 1, "native", env_kwargs={"render_mode": "rgb_array"})


@pytest.mark.parametrize("name", ["MsPacman", "ms_pacman", "MsPacmanNoFrameskip-v4", "ALE/MsPacman-v5"])
def test_games_go_by_all_their_names(name):
    assert atari(name).game == "ms_pacman"
    assert atari(name).name == "MsPacman"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Brekout", {}, "Breakout"),
        ("ALE/Pongg-v5", {}, "Pong"),
        ("CartPole-v1", {}, "No Atari game"),
        ("Pong-ram-v0", {}, "No Atari game"),
        ("Pong", {"stak": 3}, "stak.*stack"),
        ("Pong", {"stack": 0}, "stack.*at least 1"),
        ("Pong", {"size": 84.0}, "size"),
        ("Pong", {"sticky": 1.5}, "sticky"),
    ],
)
def test_wrong_game_or_option_is_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        atari(name, **options)


@pytest.mark.parametrize("missing", ["ale_py", "cv2"])
def test_a_missing_package_is_named(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=rf"{missing}.*corral-rl\[atari\]"):
        atari("Pong")


def test_suites_are_imported_without_the_emulator():
    heavy = "('ale_py', 'cv2', 'torch', 'pygame')"
    code = f"import sys, corral.envs.suites; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
