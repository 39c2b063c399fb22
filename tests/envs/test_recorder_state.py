"""What is part of the state of recorded environments, and which start anew when it is loaded."""

import itertools
import os
import random
import signal
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from helpers.recorded_envs import (
    PARTS,
    STEPS,
    ClockEnv,
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
from corral.envs.normalize import NormalizedVecEnv
from corral.testing import CountingEnv, FaultyEnv


class OddlyDeclaringEnv(DeclaringEnv):
    def state_dict(self):
        return {"rng": self.np_random}


class TrapEnv(CountingEnv):
    """Kills its process in the step after `path` has come into being."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    def step(self, action):
        if self._path.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.parametrize(
    ("env", "backend"),
    [
        (UnseededEnv, "local"),  # a worker's generators are seeded, so that one could repeat it
        (ClockEnv, "local"),
        (ClockEnv, "process"),
        (OddlyDeclaringEnv, "process"),
    ],
)
def test_unrestorable_env_starts_new_episode(env, backend):
    factories = [CountingEnvOfTwo, env, CountingEnvOfTwo]
    trajs, episodes, restarted = with_a_break(partial(make, factories, backend))
    assert restarted == [1]
    after = trajs[PARTS]
    assert after.first[0].tolist() == [trajs[PARTS - 1].first[-1, 0], True, trajs[PARTS - 1].first[-1, 2]]
    assert (after.obs[0, 1] != trajs[PARTS - 1].obs[-1, 1]).any()
    np.testing.assert_array_equal(after.obs[0, [0, 2]], trajs[PARTS - 1].obs[-1, [0, 2]])
    ended = [np.concatenate([t.done[:, b] for t in trajs]).nonzero()[0] for b in range(3)]
    assert episodes["finished"] == sum(map(len, ended))
    cut = PARTS * STEPS
    lengths = [int(length) for env_id, length in zip(*_columns(episodes), strict=True) if env_id == 1]
    starts = sorted({0, cut, *(ended[1] + 1)})
    assert lengths == [b - a for a, b in itertools.pairwise(starts) if b - 1 in ended[1]]


class CountingEnvOfTwo(WindyEnv):
    """Has WindyEnv's spaces, and counts."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at = np.zeros(2)
        return self._at.copy(), {}

    def step(self, action):
        self._at += 1
        return self._at.copy(), 1.0, bool(self._at[0] >= 7), False, {}


def _columns(episodes):
    return episodes["recent"]["env_id"].tolist(), episodes["recent"]["length"].tolist()


@pytest.mark.parametrize("backend", ["local", "process"])
def test_saving_changes_nothing(backend):
    expected, _ = straight(partial(make, "FrozenLake-v1", backend))
    with make("FrozenLake-v1", backend) as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        rollouts = sampler.rollouts(STEPS)
        trajs = []
        for _ in range(2 * PARTS):
            trajs.append(next(rollouts))
            sampler.state_dict()
    same_trajectories(trajs, expected)


def test_a_state_may_be_taken_before_the_first_trajectory():
    expected, _ = straight(partial(make, "CartPole-v1"), PARTS)
    with make("CartPole-v1") as vec:
        state = corral.Sampler(vec, Draws(vec.spec)).state_dict()
    with make("CartPole-v1") as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        assert sampler.load_state_dict(state) == []
        same_trajectories(sample(sampler), expected)


@pytest.mark.parametrize("backend", ["local", "process"])
def test_normalised_envs_keep_their_statistics(backend):
    def make_normalised():
        return NormalizedVecEnv(make("Pendulum-v1", backend))

    expected, _ = straight(make_normalised)
    trajs, _, restarted = with_a_break(make_normalised)
    assert restarted == []
    same_trajectories(trajs, expected)


def test_global_generators_of_workers_continue(tmp_path):
    def finals(parts):
        state = None
        for steps in parts:
            with make(GlobalEnv, "process", 2) as vec:
                batch = vec.recv() if state is None else None
                if state is not None:
                    assert vec.load_state_dict(through_a_file(state)) == []
                for _ in range(steps):
                    vec.send(np.arange(2), np.zeros(2, np.int64))
                    batch = vec.recv()
                state = vec.state_dict()
        return batch.raw_reward

    np.testing.assert_array_equal(finals([4, 4]), finals([8]))


class GlobalEnv(CountingEnv):
    """Draws from its process's generators what no observation shows."""

    def __init__(self):
        super().__init__(0)

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, random.random() + np.random.random(), *rest


@pytest.mark.parametrize("backend", ["local", "process"])
def test_restarted_envs_and_fault_counts_are_restored(backend):
    envs = [partial(FaultyEnv, "raise"), CountingEnv]
    expected, episodes = straight(partial(make, envs, backend))
    trajs, resumed_episodes, restarted = with_a_break(partial(make, envs, backend))
    assert restarted == []
    same_trajectories(trajs, expected)
    same(resumed_episodes, episodes)
    with make(envs, backend) as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        count, state = vec.restarts, sampler.state_dict()
    with make(envs, backend) as vec:
        corral.Sampler(vec, Draws(vec.spec)).load_state_dict(state)
        assert vec.restarts == count > 0


def test_a_worker_that_dies_while_loading_starts_new_episodes(tmp_path):
    path = tmp_path / "trap"
    envs = [CountingEnv, partial(TrapEnv, path)]
    with make(envs, "process") as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        state = sampler.state_dict()
    path.touch()
    with make(envs, "process") as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        assert sampler.load_state_dict(state) == [1]
        path.unlink()
        (traj,) = sample(sampler, 1)
        assert traj.first[0, 1]
        assert not traj.faulty.any()
        assert vec.restarts == 1


def test_dead_worker_is_left_out_when_saving():
    with make(CountingEnv, "process", 4) as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        os.kill(vec.worker_pids[1], signal.SIGKILL)
        state = sampler.state_dict()
        assert set(state["vec"]["envs"]) == {"0", "2"}
        (traj,) = sample(sampler, 1)  # and the run goes on as usual
        assert traj.faulty.any(axis=0).tolist() == [False, True, False, True]
    with make(CountingEnv, "process", 4) as vec:
        assert corral.Sampler(vec, Draws(vec.spec)).load_state_dict(state) == [1, 3]


def test_a_vector_environment_restarts_everything_with_new_seeds():
    def make_vector():
        return corral.make_vec(SyncVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 3))

    trajs, _, restarted = with_a_break(make_vector, breaks=2)
    assert restarted == [0, 1, 2] * 2
    starts = [trajs[k * PARTS].obs[0].tobytes() for k in range(3)]
    assert len(set(starts)) == 3


def test_nothing_is_recorded_unless_asked_for():
    with corral.make_vec("CartPole-v1", 3, "local") as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        state = sampler.state_dict()
    assert state["vec"]["envs"] == {}
    with make("CartPole-v1", num_envs=3) as vec:
        assert corral.Sampler(vec, Draws(vec.spec)).load_state_dict(state) == [0, 1, 2]


def test_misuse_is_refused():
    with make("CartPole-v1", num_envs=3) as vec:
        with pytest.raises(corral.UserError, match="idle"):
            vec.state_dict()
        state = corral.Sampler(vec, Draws(vec.spec)).state_dict()
        with pytest.raises(corral.UserError, match="just been made"):
            vec.load_state_dict(state["vec"])
        vec.send(np.arange(3), np.zeros(3, np.int64))
        with pytest.raises(corral.UserError, match="recv"):
            vec.state_dict()
    for env, num_envs, words in [
        ("CartPole-v1", 4, "num_envs"),
        ("Acrobot-v1", 3, "observation"),
        ("CartPole-v0", 3, "env"),
    ]:
        with (
            make(env, num_envs=num_envs) as vec,
            pytest.raises(corral.UserError, match=f"differ in .*{words}"),
        ):
            corral.Sampler(vec, Draws(vec.spec)).load_state_dict({**state, "policy": corral_policy_state(vec)})
    with make("CartPole-v1", num_envs=3) as vec, pytest.raises(corral.UserError, match="does not fit this policy"):
        corral.Sampler(vec, lambda obs: np.zeros(len(obs), np.int64)).load_state_dict(state)
    with make("CartPole-v1", num_envs=3) as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        with pytest.raises(corral.UserError, match="not sampled yet"):
            sampler.load_state_dict(state)


def corral_policy_state(vec):
    return {"0": np.zeros(vec.num_envs, np.int64), "1": np.zeros((vec.num_envs, 2), np.float32)}
