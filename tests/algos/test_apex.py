"""Ape-X's parts: a ladder of epsilons, and priorities that the actors compute."""

import numpy as np
import torch

from corral.acting.sampler import Sampler
from corral.algos.dqn import Config, Dqn, epsilon_ladder
from corral.envs.make import make_vec
from corral.learn.weights import FlatParams
from corral.nets.config import NetConfig


def make_algo(spec, num_envs=8, **settings):
    return Dqn(
        Config(prioritized_replay=True, n_step=3, gamma=0.9, net=NetConfig(hidden_sizes=(8,)), **settings),
        spec,
        num_envs,
    )


def test_the_ladder_is_that_of_the_paper():
    ladder = epsilon_ladder(360)
    np.testing.assert_allclose(ladder[[0, 359]], [0.4, 0.4**8])
    np.testing.assert_allclose(ladder[100], 0.4 ** (1 + 7 * 100 / 359))
    assert np.all(np.diff(ladder) < 0)
    assert epsilon_ladder(1) == [0.4]


def test_every_environment_explores_as_its_rung_says():
    with make_vec("CartPole-v1", 4, "local") as vec:
        algo = make_algo(vec.spec, num_envs=8, epsilon_ladder=True)
        model = algo.build_model()
        policy = algo.make_policy(model, explore=True, rng=np.random.default_rng(0), index=1)
        state = policy.initial_state(4)
        np.testing.assert_array_equal(state, epsilon_ladder(8)[4:])
        greedy = algo.make_policy(model, explore=False, rng=np.random.default_rng(0))
        bold = algo.make_policy(model, explore=True, rng=np.random.default_rng(0), index=0)
        obs = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)
        first, rungs = np.zeros(4, bool), bold.initial_state(4)
        best = greedy.act(obs, None, first)[0]
        other = np.mean([bold.act(obs, rungs, first)[0] != best for _ in range(4000)], axis=0)
        np.testing.assert_allclose(other, rungs / 2, atol=0.03)  # half of the random actions are the best one


def test_priorities_are_the_sizes_of_the_n_step_differences():
    with make_vec("CartPole-v1", 3, "local", seed=5) as vec:
        algo = make_algo(vec.spec)
        model = algo.build_model()
        policy = algo.make_policy(model, explore=True, rng=np.random.default_rng(0))
        traj = next(Sampler(vec, policy).rollouts(40))
        assert traj.terminated.any()
        traj.faulty[3, 1] = traj.truncated[3, 1] = True
        got = algo.priorities(model, traj)
        with torch.no_grad():
            q = model(torch.from_numpy(traj.obs[:-1].reshape(-1, 4))).reshape(40, 3, -1).numpy()
            ahead = model(torch.from_numpy(traj.next_obs().reshape(-1, 4))).reshape(40, 3, -1).numpy().max(-1)
        for t in range(40):
            for b in range(3):
                if traj.faulty[t, b]:
                    assert np.isnan(got[t, b])
                    continue
                total, weight, k = 0.0, 1.0, t
                while True:
                    total += weight * traj.reward[k, b]
                    weight *= 0.9
                    over = traj.terminated[k, b] or traj.truncated[k, b] or k == 39 or k - t == 2
                    if over or traj.faulty[k + 1, b]:
                        total += weight * ahead[k, b] * (not traj.terminated[k, b])
                        break
                    k += 1
                np.testing.assert_allclose(got[t, b], abs(total - q[t, b, traj.action[t, b]]), rtol=1e-4, atol=1e-5)
        FlatParams(model, algo.groups())
        model.use_numpy()
        np.testing.assert_allclose(algo.priorities(model, traj), got, rtol=1e-4, atol=1e-5)
