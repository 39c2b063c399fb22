from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import corral
from corral.core.errors import EnvFailed, UserError
from corral.envs.backends.vector import VectorVecEnv
from corral.testing import CountingEnv, TreeEnv
from corral.testing.play import play

ID, EPISODE, T, LIFE = range(4)
MODES = list(AutoresetMode)


def lengths(*each):
    return [partial(CountingEnv, length) for length in each]


@pytest.mark.parametrize("mode", MODES)
def test_only_the_row_of_an_ended_episode_waits(mode):
    vec = VectorVecEnv(SyncVectorEnv(lengths(2, 3, 0), autoreset_mode=mode))
    waits = mode is AutoresetMode.NEXT_STEP
    got = []
    with vec:
        batch = vec.recv()
        for _ in range(6):
            vec.send(batch.env_ids, np.zeros(len(batch), np.int64))
            batch = vec.recv()
            got.append(batch.env_ids.tolist())
            for k, env_id in enumerate(batch.env_ids):
                assert batch.first[k] == (batch.next_obs[k, T] == (2, 3, -1)[env_id])
                assert batch.obs[k, T] == (0 if batch.first[k] else batch.next_obs[k, T])
                assert batch.reward[k] == batch.next_obs[k, T]
    everyone = [0, 1, 2]
    # 0 ends in steps 2 and 5 of the vector, 1 in 3 and 7: the step after each is their reset.
    assert got == ([everyone, [1, 2], [0, 2], everyone, [1, 2], everyone] if waits else [everyone] * 6)


@pytest.mark.parametrize("mode", MODES)
def test_all_episodes_ending_at_once_leave_no_empty_batch(mode):
    with VectorVecEnv(SyncVectorEnv(lengths(2, 2, 2), autoreset_mode=mode)) as vec:
        for rows in play(vec, 9):
            assert [row.next_obs[LIFE] for row in rows] == list(range(1, 10))
            assert [row.done for row in rows] == [False, True] * 4 + [False]


def test_a_waiting_row_is_not_asked_for_alone():
    with VectorVecEnv(SyncVectorEnv(lengths(1, 0), autoreset_mode=AutoresetMode.NEXT_STEP)) as vec:
        batch = vec.recv()
        vec.send(batch.env_ids, np.zeros(2, np.int64))
        assert vec.recv().env_ids.tolist() == [1]
        with pytest.raises(UserError, match=r"send\(\) to environments \[1\]"):
            vec.recv(env_ids=np.array([0]))
        with pytest.raises(UserError, match=r"send\(\) to environments \[1\]"):
            vec.recv()
        vec.send(np.array([1]), np.zeros(1, np.int64))
        assert vec.recv().env_ids.tolist() == [0, 1]


@pytest.mark.parametrize("mode", MODES)
def test_buffers_of_the_vector_environment_are_copied(mode):
    venv = SyncVectorEnv([partial(CountingEnv, 3, "mixed", True)] * 3, copy=False, autoreset_mode=mode)
    with VectorVecEnv(venv) as vec:
        for rows in play(vec, 20):
            assert [row.next_obs[LIFE] for row in rows] == list(range(1, 21))
            assert all(row.next_obs[T] == row.obs[T] + 1 for row in rows)


@pytest.mark.parametrize("mode", MODES)
def test_worker_processes_of_gymnasium_and_nested_spaces(mode):
    with VectorVecEnv(AsyncVectorEnv([TreeEnv] * 2, autoreset_mode=mode)) as vec:
        for rows in play(vec, 12):
            assert [int(row.next_obs["t"]) - int(row.obs["t"]) for row in rows] == [1] * 12
            assert any(row.done for row in rows)


def test_vector_env_gets_one_seed_per_env():
    with VectorVecEnv(SyncVectorEnv([CountingEnv] * 3, autoreset_mode=AutoresetMode.SAME_STEP)) as vec:
        seen = []
        for seed in (0, 0, 1):
            vec.reset(seed)
            seen.append(vec.recv().obs[:, ID].tolist())
    assert seen[0] == seen[1]
    assert len(set(seen[0] + seen[2])) == 6
    with corral.make_vec([CountingEnv] * 3, backend="local") as local:
        assert local.recv().obs[:, ID].tolist() == seen[0]


def test_a_vector_environment_that_takes_one_seed_gets_one():
    venv = gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")
    with VectorVecEnv(venv) as vec:
        first = vec.recv().obs
        for rows in play_on(vec, 60):
            assert all((abs(row.following) <= 0.05).all() for row in rows if row.done)
        vec.reset(0)
        np.testing.assert_array_equal(vec.recv().obs, first)


def play_on(vec, rows_each):
    vec.reset(3)
    return play(vec, rows_each)


def test_wrapped_and_foreign_vector_environments_work():
    envpool = pytest.importorskip("envpool")
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=3)
    with pytest.warns(UserWarning, match="seeds are fixed"), corral.make_vec(pool) as vec:
        rows = play(vec, 60)
    assert all(row.reward == 1 for each in rows for row in each)
    assert any(row.terminated for row in rows[0])
    venv = SyncVectorEnv(lengths(4, 4), autoreset_mode=AutoresetMode.SAME_STEP)
    with corral.make_vec(gymnasium.wrappers.vector.RecordEpisodeStatistics(venv)) as vec:
        assert [row.next_obs[LIFE] for row in play(vec, 9)[0]] == list(range(1, 10))


class Odd(gymnasium.vector.VectorEnv):
    """Two environments in one, with whatever the test wants to be wrong."""

    def __init__(self, mode=AutoresetMode.SAME_STEP, shape=(2, 1), reward=0.0, ended=False):
        self.num_envs = 2
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.shape, self.reward, self.ended, self.closed_count = shape, reward, ended, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.shape, np.float32), {}

    def step(self, actions):
        no = np.zeros(2, bool)
        return np.zeros(self.shape, np.float32), np.array([0.0, self.reward]), no | self.ended, no, {}

    def close_extras(self, **kwargs):
        self.closed_count += 1


def test_vector_env_needs_an_autoreset_mode():
    with pytest.raises(UserError, match="autoreset_mode"):
        VectorVecEnv(Odd(mode=None))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reward": np.nan}, EnvFailed, r"Environments \[1\] of Odd"),
        ({"ended": True}, UserError, "final_obs"),
    ],
)
def test_a_broken_step_ends_the_run_and_closes_everything(options, error, message):
    venv = Odd(**options)
    vec = VectorVecEnv(venv)
    vec.send(vec.recv().env_ids, np.zeros(2, np.int64))
    with pytest.raises(error, match=message):
        vec.recv()
    assert venv.closed_count == 1
    with pytest.raises(UserError, match="closed"):
        vec.recv()


def test_observations_of_the_wrong_shape_are_refused():
    with pytest.raises(UserError, match=r"shape \(3, 1\), expected \(2, 1\)"):
        VectorVecEnv(Odd(shape=(3, 1))).recv()


def test_the_original_is_given_back_and_sb3_needs_same_step():
    venv = SyncVectorEnv(lengths(2), autoreset_mode=AutoresetMode.NEXT_STEP)
    with VectorVecEnv(venv) as vec:
        assert vec.as_gymnasium() is venv
        with pytest.raises(UserError, match="SAME_STEP"):
            vec.as_sb3()
