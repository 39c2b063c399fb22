"""The loss of DQN against a literal version, and its exploration."""

import copy

import numpy as np
import pytest
import torch
from helpers.batches import SPECS, experience, gradients, learned, randomize
from helpers.literal_losses import (
    PATHS,
    number,
    numpy_of,
)

from corral.algos import dqn
from corral.core.errors import UserError
from corral.data.transition_replay import TransitionReplay


def transitions_for(algo, seed=0):
    """Transitions as replay gives them, of episodes that end in every way."""
    store = TransitionReplay(algo.spec, algo.data, 4, seed)
    for k in range(3):
        traj = experience(algo.spec, 30, 4, seed + k, end=0.15, fault=0.05)
        store.put(traj)
    return store.get().batch


@pytest.mark.parametrize("space", ["discrete", "multi_discrete"])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dueling", [True, False, "shared"])
@pytest.mark.parametrize("prioritised", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_dqn_loss_regresses_to_best_next_value(space, double, dueling, prioritised, path):
    config = dqn.Config(
        double_q=double, dueling=dueling, prioritized_replay=prioritised, batch_size=64, learning_starts=64
    )
    algo = dqn.Dqn(config, SPECS[space], 4)
    model, target = randomize(algo.build_model(), 0, 0.3), randomize(algo.build_model(), 1, 0.3)
    batch = transitions_for(algo)
    batch.weight = np.random.default_rng(0).uniform(0.1, 1, 64).astype(np.float32)
    batch.reward *= 3  # so that both parts of the Huber loss are met
    output, found = learned(algo, model, batch, path, target=target)
    q = model(torch.from_numpy(batch.obs))
    next_q, next_target = (numpy_of(net(torch.from_numpy(batch.next_obs))) for net in (model, target))
    terms, errors = [], []
    for i in range(64):
        best = np.argmax(next_q[i] if double else next_target[i])
        goal = batch.reward[i] + batch.discount[i] * next_target[i][best]
        chosen = batch.action[i] if space == "discrete" else 3 * batch.action[i][0] + batch.action[i][1]
        error = q[i, chosen] - float(goal)
        huber = 0.5 * error**2 if abs(error) < 1 else abs(error) - 0.5
        terms.append(huber * (batch.weight[i] if prioritised else 1))
        errors.append(abs(number(error)))
    assert min(errors) < 1 < max(errors)
    expected = sum(terms) / 64
    assert number(output.loss) == pytest.approx(number(expected), rel=1e-4)
    assert number(output.metrics["loss/q"]) == pytest.approx(_mean_q(q, batch, algo), rel=1e-4, abs=1e-5)
    if prioritised:
        np.testing.assert_allclose(np.asarray(output.priorities), errors, atol=1e-4)
    for mine, theirs in zip(found, gradients(expected, model), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    assert all((param.grad == 0).all() for param in target.parameters())


def _mean_q(q, batch, algo):
    return float(np.mean([number(q[i, chosen]) for i, chosen in enumerate(algo.choices.from_env(batch.action))]))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", PATHS)
def test_only_a_terminated_episode_ends_the_value(n, path):
    """Rewards of 1: a transition's target is the sum of m of them and, unless terminated, gamma^m of what follows."""
    config = dqn.Config(n_step=n, gamma=0.5, batch_size=256, learning_starts=256, double_q=False)
    algo = dqn.Dqn(config, SPECS["discrete"], 4)
    target = algo.build_model()
    with torch.no_grad():
        for param in target.parameters():
            param.zero_()
        target.head.bias.fill_(100.0)
    store = TransitionReplay(algo.spec, algo.data, 4, 0)
    seen = set()
    for seed in range(8):
        traj = experience(algo.spec, 40, 4, seed, end=0.2)
        traj.reward[:] = 1
        store.put(traj)
    batch = store.get().batch
    model = copy.deepcopy(target)
    with torch.no_grad():
        model.head.bias.zero_()
    algo_loss = dqn.Dqn(dqn.Config(prioritized_replay=True, double_q=False), SPECS["discrete"], 4)
    goals = np.asarray(learned(algo_loss, model, batch, path, target=target)[0].priorities)
    for goal, discount in zip(goals, batch.discount, strict=True):
        steps = {m: sum(0.5**k for k in range(m)) for m in range(1, n + 1)}
        if discount == 0:
            assert any(goal == pytest.approx(total) for total in steps.values())
        else:
            m = round(np.log(discount) / np.log(0.5))
            assert goal == pytest.approx(steps[m] + 0.5**m * 100)
        seen.add(float(discount))
    assert seen == {0.0, *(0.5**m for m in range(1, n + 1))}


def test_epsilon_falls_linearly_and_stays():
    algo = dqn.Dqn(
        dqn.Config(exploration_initial_eps=0.9, exploration_final_eps=0.1, exploration_fraction=0.4),
        SPECS["discrete"],
        1,
    )
    assert [algo.epsilon(p) for p in (0.0, 0.1, 0.2, 0.4, 1.0)] == pytest.approx([0.9, 0.7, 0.5, 0.1, 0.1])
    algo = dqn.Dqn(dqn.Config(exploration_fraction=0.0), SPECS["discrete"], 1)
    assert algo.epsilon(0.0) == pytest.approx(algo.config.exploration_final_eps)


def test_epsilon_is_share_of_random_actions():
    algo = dqn.Dqn(dqn.Config(exploration_initial_eps=0.4, exploration_final_eps=0.4), SPECS["multi_discrete"], 1)
    model = randomize(algo.build_model())
    obs = np.random.default_rng(0).normal(size=(20_000, 3)).astype(np.float32)
    best = model(torch.from_numpy(obs)).argmax(-1).numpy()
    policy = algo.make_policy(model, explore=True, rng=np.random.default_rng(1))
    got = algo.choices.from_env(policy.act(obs, None, np.zeros(len(obs), bool))[0])
    share = (got != best).mean()
    assert share == pytest.approx(0.4 * 5 / 6, abs=0.015)
    counts = np.bincount((got - best)[got != best] % 6, minlength=6)[1:]
    expected = counts.sum() / 5
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # 0.1 % of 4 degrees of freedom
    greedy = algo.make_policy(model, explore=False, rng=np.random.default_rng(1))
    assert (algo.choices.from_env(greedy.act(obs, None, np.zeros(len(obs), bool))[0]) == best).all()


def test_a_policy_of_values_decides_the_same_in_two_halves():
    algo = dqn.Dqn(dqn.Config(exploration_initial_eps=0.5, exploration_final_eps=0.5), SPECS["discrete"], 1)
    model = randomize(algo.build_model())
    obs = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    first = np.zeros(8, bool)
    whole, halves = (algo.make_policy(model, explore=True, rng=np.random.default_rng(2)) for _ in range(2))
    for _ in range(10):
        expected = whole.act(obs, None, first)[0]
        parts = [halves.act(half, None, first[:4])[0] for half in np.split(obs, 2)]
        np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_priority_settings_reach_the_store():
    config = dqn.Config(prioritized_replay=True, prioritized_replay_alpha=0.3, prioritized_replay_beta=0.9)
    data = dqn.Dqn(config, SPECS["discrete"], 4).data
    assert (data.priority_alpha, data.priority_beta, data.priority_eps) == (0.3, 0.9, 1e-6)
    with pytest.raises(UserError, match="prioritized_replay_alpha"):
        dqn.Config(prioritized_replay_alpha=-1.0)
