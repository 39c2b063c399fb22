"""Sampling with one's own policy: what comes out is what happened."""

import gc
from functools import partial
from itertools import pairwise

import numpy as np
import psutil
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import corral
from corral.core.types import cat, slice_envs
from corral.testing import CountingEnv, FaultyEnv, OneStateEnv, SlowEnv, TreeEnv
from corral.testing.contracts.vec_env import EPISODE, ID, LIFE, T


def zeros(obs):
    return np.zeros(len(obs), np.int64)


def take(sampler, steps, count, **kwargs):
    rollouts = sampler.rollouts(steps, **kwargs)
    return [next(rollouts) for _ in range(count)]


def check(traj):
    """Every number of a CountingEnv's trajectory."""
    successors = traj.next_obs()
    np.testing.assert_array_equal(successors[..., T], traj.obs[:-1][..., T] + 1)
    np.testing.assert_array_equal(successors[..., LIFE], traj.obs[:-1][..., LIFE] + 1)
    np.testing.assert_array_equal(traj.reward, successors[..., T])
    np.testing.assert_array_equal(traj.first[1:], traj.done)
    np.testing.assert_array_equal(traj.obs[..., T] == 0, traj.first)
    assert len(traj.final_at) == traj.done.sum()


@pytest.mark.parametrize(("backend", "workers"), [("local", None), ("process", 1), ("process", 2)])
def test_trajectories_follow_on_and_keep_last_observations(backend, workers):
    with corral.Sampler(partial(CountingEnv, 5, "mixed"), zeros, 6, backend, workers) as sampler:
        trajs = take(sampler, 7, 5)
    for before, after in pairwise(trajs):
        np.testing.assert_array_equal(before.obs[-1], after.obs[0])
        np.testing.assert_array_equal(before.first[-1], after.first[0])
    for traj in trajs:
        assert traj.shape == (7, 6)
        assert traj.obs.shape == (8, 6, 4)
        assert traj.env_id.tolist() == list(range(6))
        check(traj)
        ended = traj.obs[:-1][..., EPISODE][traj.done].astype(int) % 3
        assert traj.terminated[traj.done].tolist() == [k in (0, 2) for k in ended]
        assert traj.truncated[traj.done].tolist() == [k in (1, 2) for k in ended]
    assert (trajs[-1].obs[-1][:, LIFE] == 35).all()


def test_successors_across_truncations_equal_a_naive_buffer():
    naive = []

    class Recorder(CountingEnv):
        def step(self, action):
            before = self._observe()
            result = super().step(action)
            naive.append((before, result[0].copy()))
            return result

    with corral.Sampler(partial(Recorder, 3, "truncated"), zeros, 1, "local") as sampler:
        trajs = take(sampler, 8, 20)
    pairs = [(o, n) for traj in trajs for o, n in zip(traj.obs[:-1, 0], traj.next_obs()[:, 0], strict=True)]
    np.testing.assert_array_equal(pairs, naive)


def test_gae_over_mixed_ends_equals_formula_per_episode():
    gamma, lam = 0.9, 0.8
    with corral.Sampler(partial(CountingEnv, 4, "mixed"), zeros, 2, "local") as sampler:
        (traj,) = take(sampler, 14, 1)

    def value(obs):
        return np.sin(obs[..., EPISODE] + 0.3 * obs[..., T])

    advantages = np.zeros(traj.shape)
    running = np.zeros(2)
    values, next_values = value(traj.obs[:-1]), value(traj.next_obs())
    for t in reversed(range(14)):
        delta = traj.reward[t] + gamma * next_values[t] * ~traj.terminated[t] - values[t]
        running = delta + gamma * lam * ~traj.done[t] * running
        advantages[t] = running
    for b in range(2):  # literally: sum over the rest of the episode, knowing only what CountingEnv does
        for t in range(14):
            total, weight, step, k = 0.0, 1.0, t % 4, t
            while step < 4 and k < 14:
                last = step == 3
                terminal = last and (k // 4) % 3 in (0, 2)
                episode = k // 4
                v, v_next = np.sin(episode + 0.3 * step), np.sin(episode + 0.3 * (step + 1))
                total += weight * (step + 1 + gamma * v_next * (not terminal) - v)
                weight, step, k = weight * gamma * lam, step + 1, k + 1
            assert advantages[t, b] == pytest.approx(total, rel=1e-5)


def test_a_time_limit_leads_to_the_true_value():
    value = 0.0
    with corral.Sampler(partial(OneStateEnv, 5), zeros, 4, "local") as sampler:
        for traj in take(sampler, 50, 8):
            for reward, terminated in zip(traj.reward.ravel(), traj.terminated.ravel(), strict=True):
                value += 0.05 * (reward + 0.9 * value * (not terminated) - value)
    assert value == pytest.approx(10.0, abs=0.5)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_trajectories_do_not_depend_on_number_of_workers(workers):
    def rollout(workers):
        rng = np.random.default_rng(0)
        policy = lambda obs: rng.integers(0, 2, len(obs))  # noqa: E731
        with corral.Sampler("CartPole-v1", policy, 8, "process", workers, seed=11) as sampler:
            return cat([take(sampler, 64, 1)[0]])

    first, second = rollout(2), rollout(workers)
    np.testing.assert_array_equal(first.obs, second.obs)
    np.testing.assert_array_equal(first.action, second.action)
    np.testing.assert_array_equal(first.next_obs(), second.next_obs())


class Memory:
    """Counts its own calls per environment, forgetting at the start of an episode."""

    def initial_state(self, n):
        return {"count": torch.zeros(n)}

    def act(self, obs, state, first):
        count = torch.as_tensor(state["count"]) * torch.as_tensor(~first) + 1
        action = torch.zeros(len(first), dtype=torch.int64)
        return action, {"count": count}, {"logp": torch.full((len(first),), -1.5), "count": count}


@pytest.mark.parametrize("backend", ["local", "process"])
def test_policy_state_is_per_env_and_extras_are_recorded(backend):
    with corral.Sampler(partial(CountingEnv, 5), Memory(), 5, backend, 2) as sampler:
        for traj in take(sampler, 8, 3):
            np.testing.assert_array_equal(traj.extras["count"], traj.obs[:-1][..., T] + 1)
            assert traj.extras["logp"].shape == (8, 5)
            assert (traj.extras["logp"] == -1.5).all()


def test_nested_spaces_come_out_as_trees():
    def policy(obs):
        return obs["echo"]

    with corral.Sampler(TreeEnv, policy, 3, "local") as sampler:
        (traj,) = take(sampler, 10, 1)
    successor = traj.next_obs()
    np.testing.assert_array_equal(successor["echo"]["move"][0], traj.action["move"][0])
    assert traj.obs["echo"]["keys"].shape == (11, 3, 2)
    assert (successor["t"] == traj.obs["t"][:-1] + 1).all()


@pytest.mark.parametrize("backend", ["local", "process"])
def test_first_ready_loses_nothing(backend):
    factories = [partial(SlowEnv, 0.0, 0.02 * (i == 0), 7) for i in range(4)]
    vec = corral.make_vec(factories, backend=backend, workers=4)
    seen = {i: [] for i in range(4)}
    with vec, corral.Sampler(vec, zeros) as sampler:
        for traj in take(sampler, 5, 12, first_ready=2):
            check(traj)
            assert len(traj.env_id) >= 2
            for column, env_id in enumerate(traj.env_id.tolist()):
                seen[env_id] += traj.next_obs()[:, column, LIFE].tolist()
    for rows in seen.values():
        assert rows == list(range(1, len(rows) + 1))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_gymnasium_vector_env_in_every_autoreset_mode(mode):
    vec = corral.make_vec(SyncVectorEnv([partial(CountingEnv, 4, "mixed")] * 3, autoreset_mode=mode))
    seen = {i: [] for i in range(3)}
    with vec, corral.Sampler(vec, zeros) as sampler:
        for traj in take(sampler, 6, 6):
            check(traj)
            for column, env_id in enumerate(traj.env_id.tolist()):
                seen[env_id] += traj.next_obs()[:, column, LIFE].tolist()
    for rows in seen.values():
        assert rows == list(range(1, len(rows) + 1))


def test_faulty_rows_are_marked_and_kept_out_of_the_statistics():
    with corral.Sampler([CountingEnv, partial(FaultyEnv, "raise")], zeros, backend="local") as sampler:
        trajs = take(sampler, 20, 3)
    faulty = np.concatenate([t.faulty for t in trajs])
    assert not faulty[:, 0].any()
    assert faulty[:, 1].sum() == sampler.episodes.faulty >= 5
    assert {episode.episode_return for episode in sampler.episodes.recent} == {15.0}
    assert {episode.length for episode in sampler.episodes.recent} == {5}
    assert sampler.episodes.mean_return() == 15.0


def test_second_rollouts_call_continues_episodes():
    with corral.Sampler(partial(CountingEnv, 0), zeros, 3, "process", 2) as sampler:
        (a,) = take(sampler, 4, 1)
        (b,) = take(sampler, 6, 1)
        take(sampler, 3, 2, first_ready=1)
        (c,) = take(sampler, 2, 1)
    assert (a.obs[-1] == b.obs[0]).all()
    assert (c.next_obs()[..., LIFE] == c.obs[:-1][..., LIFE] + 1).all()
    assert (c.obs[0][:, LIFE] >= 10).all()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_second_rollouts_call_in_every_autoreset_mode(mode):
    vec = corral.make_vec(SyncVectorEnv([partial(CountingEnv, 4, "mixed")] * 3, autoreset_mode=mode))
    with vec, corral.Sampler(vec, zeros) as sampler:
        for steps in (4, 5, 6, 7, 8):
            for traj in take(sampler, steps, 3):
                check(traj)


@pytest.mark.parametrize("backend", ["local", "process"])
def test_rollouts_after_a_policy_error_go_on_where_they_were(backend):
    calls = 0

    def policy(obs):
        nonlocal calls
        calls += 1
        if calls == 6:
            raise ArithmeticError
        obs[...] = -1  # a policy may overwrite what it was given
        return zeros(obs)

    with corral.Sampler(partial(CountingEnv, 0), policy, 4, backend, 2) as sampler:
        with pytest.raises(ArithmeticError):
            take(sampler, 8, 1)
        for traj in take(sampler, 3, 2):
            np.testing.assert_array_equal(traj.next_obs()[..., LIFE], traj.obs[:-1][..., LIFE] + 1)


def test_older_rollouts_iterator_is_refused():
    with corral.Sampler(partial(CountingEnv, 0), zeros, 2, "local") as sampler:
        first = sampler.rollouts(4)
        next(first)
        take(sampler, 4, 1)
        with pytest.raises(corral.UserError, match="A later call of rollouts"):
            next(first)


def test_extras_that_change_their_dtype_keep_their_values():
    class Odd:
        calls = 0

        def initial_state(self, n):
            return None

        def act(self, obs, state, first):
            self.calls += 1
            value = np.ones(len(first), np.int64) if self.calls == 1 else np.full(len(first), 0.7)
            return np.zeros(len(first), np.int64), None, {"x": value}

    with corral.Sampler(CountingEnv, Odd(), 2, "local") as sampler:
        np.testing.assert_array_equal(take(sampler, 3, 1)[0].extras["x"][:, 0], [1, 0.7, 0.7])


def test_a_state_without_a_row_per_environment_is_refused():
    class Layers(Memory):
        def initial_state(self, n):
            return np.zeros((2, n, 8))

    with (
        corral.Sampler(CountingEnv, Layers(), 4, "local") as sampler,
        pytest.raises(corral.UserError, match="leading size of 4"),
    ):
        take(sampler, 3, 1)


def test_endless_episode_keeps_memory_flat():
    with corral.Sampler(partial(CountingEnv, 0), zeros, 4, "local") as sampler:
        rollouts = sampler.rollouts(64)
        for _ in range(20):
            next(rollouts)
        gc.collect()
        before = psutil.Process().memory_info().rss
        for _ in range(150):
            next(rollouts)
        gc.collect()
        assert psutil.Process().memory_info().rss - before < 2_000_000


def test_environments_may_be_sliced_and_joined():
    with corral.Sampler(partial(CountingEnv, 4, "mixed"), zeros, 5, "local") as sampler:
        (traj,) = take(sampler, 9, 1)
    parts = slice_envs(traj, np.array([3, 0])), slice_envs(traj, np.array([1, 2, 4]))
    joined = cat(parts)
    assert joined.env_id.tolist() == [3, 0, 1, 2, 4]
    back = slice_envs(joined, np.array([1, 2, 3, 0, 4]))
    np.testing.assert_array_equal(back.next_obs(), traj.next_obs())
    check(parts[0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: next(s.rollouts(0)), "at least 1"),
        (lambda s: next(s.rollouts(4, first_ready=9)), "between 1 and num_envs"),
    ],
)
def test_misuse_is_refused(call, words):
    with (
        corral.Sampler(CountingEnv, zeros, 2, "local") as sampler,
        pytest.raises(corral.UserError, match=words),
    ):
        call(sampler)


def test_invalid_policy_is_refused():
    with pytest.raises(corral.UserError, match="not a policy"):
        corral.Sampler(CountingEnv, None, 2, "local")
    with (
        corral.Sampler(CountingEnv, lambda obs: np.zeros(3), 2, "local") as sampler,
        pytest.raises(corral.UserError, match="shape"),
    ):
        next(sampler.rollouts(4))
    with (
        corral.Sampler("Pendulum-v1", lambda obs: np.full((2, 1), np.nan), 2, "local") as sampler,
        pytest.raises(corral.UserError, match="NaN"),
    ):
        next(sampler.rollouts(4))


def test_a_handed_in_vec_env_stays_open():
    with corral.make_vec(CountingEnv, 2, "local") as vec:
        with corral.Sampler(vec, zeros) as sampler:
            take(sampler, 3, 1)
        vec.send(np.arange(2), np.zeros(2, np.int64))
        assert len(vec.recv()) == 2


def test_ids_of_environments_are_spread():
    with corral.Sampler(CountingEnv, zeros, 64, "local") as sampler:
        (traj,) = take(sampler, 2, 1)
    assert len(set(traj.obs[0, :, ID])) == 64
