import numpy as np
import pytest

import corral
from corral.core.errors import UserError
from corral.envs.backends.native.ale import AleVecEnv
from corral.envs.backends.native.choose import native_vec_env
from corral.testing import CountingEnv
from corral.testing.play import play


@pytest.fixture
def pong():
    pytest.importorskip("ale_py")
    with corral.make_vec("ALE/Pong-v5", 3, "native", env_kwargs={"size": 42}) as vec:
        yield vec


def cartpole(num_envs=4, **options):
    pytest.importorskip("envpool")
    return corral.make_vec("CartPole-v1", num_envs, "native", **options)


def out_of_bounds(obs):
    return (np.abs(obs[:, 0]) > 2.4) | (np.abs(obs[:, 2]) > 12 * np.pi / 180)


def test_an_atari_id_stands_for_the_standard_stack(pong):
    assert isinstance(pong, AleVecEnv)
    assert pong.spec.observation_space.shape == (4, 42, 42)
    assert len(play(pong, 5)) == 3


def test_ale_steps_when_the_last_action_is_there(pong):
    batch = pong.recv()
    pong.send(np.array([0, 1]), np.zeros(2, np.int64))
    with pytest.raises(UserError, match=r"send\(\) to environments \[2\]"):
        pong.recv()
    pong.send(np.array([2]), np.zeros(1, np.int64))
    some = pong.recv(env_ids=np.array([1]))
    assert some.env_ids.tolist() == [1]
    pong.send(some.env_ids, np.zeros(1, np.int64))
    with pytest.raises(UserError, match=r"recv\(\) environments \[0, 2\]"):
        pong.recv(env_ids=np.array([1]))
    others = pong.recv()
    assert others.env_ids.tolist() == [0, 2]
    pong.send(others.env_ids, np.zeros(2, np.int64))
    assert len(pong.recv(min_ready=1)) == len(batch) == 3


def test_ale_can_be_reset_and_closed_in_the_middle_of_a_step(pong):
    first = pong.recv()
    pong.send(first.env_ids, np.zeros(3, np.int64))
    pong.reset(0)
    again = pong.recv()
    assert again.first.all()
    np.testing.assert_array_equal(again.obs, first.obs)
    pong.send(again.env_ids, np.zeros(3, np.int64))
    pong.close()
    pong.close()
    with pytest.raises(UserError, match="closed"):
        pong.recv()


def test_ale_games_differ_by_seed():
    pytest.importorskip("ale_py")
    with corral.make_vec("ALE/Breakout-v5", 3, "native") as vec:
        frames = []
        for seed in range(4):
            vec.reset(seed)
            frames += list(vec.recv().obs)
    assert len({frame.tobytes() for frame in frames}) > 6  # of 30 possible starts


def test_envpool_rows_are_real_steps_with_true_last_observations():
    ends = 0
    with cartpole(5) as vec:
        batch, rng = vec.recv(), np.random.default_rng(0)
        assert batch.first.all()
        for _ in range(200):
            vec.send(batch.env_ids, rng.integers(0, 2, 5))
            batch = vec.recv()
            np.testing.assert_array_equal(batch.first, batch.terminated | batch.truncated)
            np.testing.assert_array_equal(batch.terminated, out_of_bounds(batch.next_obs))
            assert (np.abs(batch.obs[batch.first]) <= 0.05).all()  # where CartPole starts
            assert (batch.reward == 1).all()  # a reset row would have 0
            ends += int(batch.game_over.sum())
    assert ends > 20


def test_envpool_termination_at_last_allowed_step():
    seen = set()
    with cartpole(32, env_kwargs={"max_episode_steps": 10}) as vec:
        assert vec.spec.max_episode_steps == 10
        for rows in play(vec, 60):
            length = 0
            for row in rows:
                length += 1
                assert row.terminated == out_of_bounds(row.next_obs[None])[0]
                assert row.truncated == (length == 10)
                if row.done:
                    seen.add((row.terminated, row.truncated))
                    length = 0
    assert seen == {(True, False), (False, True), (True, True)}


def test_envpool_steps_whom_it_is_sent_to():
    with cartpole(4) as vec:
        first = vec.recv()
        vec.send(np.array([3, 1]), np.array([1, 0]))
        vec.send(np.array([0]), np.array([1]))
        some = vec.recv(env_ids=np.array([1, 3]))
        assert some.env_ids.tolist() == [1, 3]
        assert some.obs[0, 1] < first.obs[1, 1]  # pushed to the left
        assert some.obs[1, 1] > first.obs[3, 1]
        assert vec.recv().env_ids.tolist() == [0]


def test_envpool_seeds_come_from_the_run():
    def starts(seed, num_envs=6):
        with cartpole(num_envs, seed=seed) as vec:
            return [tuple(row) for row in vec.recv().obs.tolist()]

    assert starts(0) == starts(0)
    assert starts(0)[:3] == starts(0, 3)
    assert len(set(starts(0) + starts(1))) == 12
    with cartpole(6, seed=0) as vec:
        vec.reset(1)
        assert [tuple(row) for row in vec.recv().obs.tolist()] == starts(1)


def test_auto_keeps_the_environment():
    for env in ("CartPole-v1", "ALE/Pong-v5", CountingEnv):
        assert native_vec_env(env, None, 2, 1, "train", required=False) is None


@pytest.mark.parametrize(
    ("env", "kwargs", "message"),
    [
        (CountingEnv, None, "no native form"),
        ("CartPol-v1", None, "Close: .*CartPole-v1"),
        ("CartPole-v1", {"nonsense": 3}, "nonsense"),
        ("ALE/Pong-v5", {"nonsense": 3}, "nonsense"),
        ("ALE/Pongo-v5", None, "Pong"),
    ],
)
def test_native_refuses_unsupported_envs(env, kwargs, message):
    pytest.importorskip("envpool")
    pytest.importorskip("ale_py")
    with pytest.raises(UserError, match=message):
        corral.make_vec(env, 2, "native", env_kwargs=kwargs)


def test_envpools_atari_ids_are_the_same_standard_stack():
    pytest.importorskip("envpool")
    pytest.importorskip("ale_py")
    with corral.make_vec("Pong-v5", 1, "native") as vec:
        assert isinstance(vec, AleVecEnv)
