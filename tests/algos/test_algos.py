"""Losses against literal NumPy, and what must not change them."""

import copy
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.batches import SPECS, act_on, batch_for, experience, gradients, learned, on_path, randomize

from corral.algos import a2c, dqn, ppo, reinforce
from corral.algos.trajectories import compute_values, evaluate_actions
from corral.core.errors import UserError
from corral.core.types import EnvSpec, Sample, Transitions, slice_envs, tree_map
from corral.data.episodes import EpisodeStore
from corral.data.replay import ReplayStore
from corral.learn.device import Precision
from corral.learn.learner import Learner
from corral.nets.config import NetConfig

ON_POLICY = {
    "ppo": (ppo.Ppo, ppo.Config),
    "a2c": (a2c.A2c, a2c.Config),
    "reinforce": (reinforce.Reinforce, reinforce.Config),
}
PATHS = ["torch", "numpy"]
LSTM = NetConfig(hidden_sizes=(8,), rnn="lstm", rnn_size=6)
GRU = NetConfig(hidden_sizes=(8,), rnn="gru", rnn_size=6)


def make(name, space="discrete", **settings):
    kind, config = ON_POLICY[name]
    algo = kind(config(**settings), SPECS[space], 4)
    return algo, randomize(algo.build_model(), scale=0.3)


def cases(names=ON_POLICY, spaces_=SPECS, cores=(None,)):
    found = [(n, s, None) for n in names for s in spaces_]
    return found + [(n, "hybrid", core) for n in names if n != "reinforce" for core in cores if core]


def number(loss):
    return float(torch.as_tensor(loss).detach())


def numpy_of(tensor):
    return tensor.detach().double().numpy()


def literal_distribution(model, params, action):
    """Log-probabilities and entropies by torch's own distributions."""
    sizes, at = model.actions.sizes, 0
    logp = entropy = torch.zeros(params.shape[:-1])
    for k, size in enumerate(sizes):
        part = torch.distributions.Categorical(logits=params[..., at : at + size])
        logp, entropy = logp + part.log_prob(action[..., k]), entropy + part.entropy()
        at += size
    if model.actions.num_numbers:
        mean, log_std = params[..., at:].chunk(2, -1)
        part = torch.distributions.Normal(mean, log_std.exp())
        logp = logp + part.log_prob(action[..., len(sizes) :]).sum(-1)
        entropy = entropy + part.entropy().sum(-1)
    return logp, entropy


def forward(model, rows):
    if rows.state is None:
        params, value = model(rows.obs)
    else:
        params, value, _ = model.unroll(rows.obs, rows.state, rows.first)
    return *literal_distribution(model, params, rows.action), value


def counted(tensor, rows):
    """The values of the rows that count, in a line, as float64."""
    flat = numpy_of(tensor)
    return flat.reshape(-1) if rows.mask is None else flat[rows.mask.numpy()]


# -- values and advantages -----------------------------------------------------------------------------------------


def test_values_are_of_what_was_seen_and_of_the_true_successors():
    algo, model = make("ppo")
    traj = batch_for(algo, model)
    assert len(traj.final_at) > 3
    value, after = compute_values(model, traj)
    for t, b in np.ndindex(*traj.shape):
        row = {"now": traj.obs[t, b], "then": traj.next_obs()[t, b]}
        seen = {key: float(model(torch.from_numpy(obs[None]))[1].detach()) for key, obs in row.items()}
        assert value[t, b] == pytest.approx(seen["now"], abs=1e-5)
        assert after[t, b] == pytest.approx(seen["then"], abs=1e-5)


@pytest.mark.parametrize("net", [LSTM, GRU])
def test_with_a_memory_it_goes_on_into_an_episodes_last_observation(net):
    algo, model = make("ppo", net=net)
    traj = batch_for(algo, model, end=0.2)
    value, after = compute_values(model, traj)
    ends = {(int(t), int(b)): k for k, (t, b) in enumerate(traj.final_at)}
    assert len(ends) > 3
    for b in range(traj.shape[1]):
        state = torch.zeros(1, model.core.state_size)
        for t in range(traj.shape[0]):
            first = torch.from_numpy(traj.first[t, b : b + 1])

            def see(obs, state, first):
                _, seen, states = model.unroll(torch.from_numpy(obs)[None, None], state, first[None])
                return float(seen.detach()), states[0].detach()

            seen, state = see(traj.obs[t, b], state, first)
            assert value[t, b] == pytest.approx(seen, abs=1e-5)
            end = ends.get((t, b))
            following = traj.obs[t + 1, b] if end is None else traj.final_obs[end]
            assert after[t, b] == pytest.approx(see(following, state, torch.zeros(1, dtype=torch.bool))[0], abs=1e-5)


@pytest.mark.parametrize("name", ["ppo", "a2c"])
@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_advantages_are_summed_to_the_end_of_the_episode_and_no_further(name, lam):
    algo, model = make(name, gamma=0.9, gae_lambda=lam)
    traj = batch_for(algo, model, end=0.2)
    assert traj.terminated.any()
    assert (traj.truncated & ~traj.terminated).any()
    value, after = compute_values(model, traj)
    rows = algo.prepare(model, traj)
    advantage = numpy_of(rows.advantages).reshape(traj.shape)
    for t, b in np.ndindex(*traj.shape):
        total, weight = 0.0, 1.0
        for k in range(t, traj.shape[0]):
            bootstrap = 0.0 if traj.terminated[k, b] else after[k, b]
            total += weight * (traj.reward[k, b] + 0.9 * bootstrap - value[k, b])
            weight *= 0.9 * lam
            if traj.done[k, b]:
                break
        assert advantage[t, b] == pytest.approx(total, abs=1e-4)
    np.testing.assert_allclose(rows.returns, rows.advantages + rows.old_values, rtol=1e-6)
    np.testing.assert_allclose(numpy_of(rows.old_values).reshape(traj.shape), value)


def test_lam_1_is_the_n_step_advantage_and_lam_0_is_td():
    _, model = make("a2c")
    for lam, steps in ((1.0, 12), (0.0, 1)):
        algo = a2c.A2c(a2c.Config(gamma=0.5, gae_lambda=lam, num_steps=12), SPECS["discrete"], 4)
        traj = batch_for(algo, model, end=0.0)
        value, after = compute_values(model, traj)
        target = numpy_of(algo.prepare(model, traj).returns).reshape(traj.shape)
        last = min(steps, 12) - 1
        expected = sum(0.5**k * traj.reward[k] for k in range(last + 1)) + 0.5 ** (last + 1) * after[last]
        np.testing.assert_allclose(target[0], expected, rtol=1e-4)
        assert not np.allclose(value[0], expected)


# -- losses --------------------------------------------------------------------------------------------------------


def disturbed(rows, seed=0):
    """Rows as if the policy and the value had moved since."""
    generator = torch.Generator().manual_seed(seed)
    rows.old_log_prob = rows.old_log_prob + torch.empty(rows.old_log_prob.shape).uniform_(
        -0.6, 0.6, generator=generator
    )
    rows.old_values = rows.old_values + torch.empty(rows.old_values.shape).uniform_(-0.6, 0.6, generator=generator)
    return rows


def literal_ppo(model, rows, config, clip):
    logp, entropy, value = (counted(x, rows) for x in forward(model, rows))
    old_logp, old_value, target, advantage = (
        counted(x, rows) for x in (rows.old_log_prob, rows.old_values, rows.returns, rows.advantages)
    )
    if config.normalize_advantage:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy, error, kl, beyond = [], [], [], []
    for i in range(len(logp)):
        ratio = np.exp(logp[i] - old_logp[i])
        policy.append(-min(ratio * advantage[i], max(1 - clip, min(1 + clip, ratio)) * advantage[i]))
        errors = [(value[i] - target[i]) ** 2]
        if config.clip_range_vf is not None:
            moved = max(-config.clip_range_vf, min(config.clip_range_vf, value[i] - old_value[i]))
            errors.append((old_value[i] + moved - target[i]) ** 2)
        error.append(max(errors))
        kl.append(ratio - 1 - np.log(ratio))
        beyond.append(abs(ratio - 1) > clip)
    said = {
        "loss/policy": np.mean(policy),
        "loss/value": np.mean(error) / 2,
        "loss/entropy": entropy.mean(),
        "loss/kl": np.mean(kl),
        "loss/clip_fraction": np.mean(beyond),
    }
    loss = said["loss/policy"] + config.vf_coef * said["loss/value"] - config.ent_coef * said["loss/entropy"]
    return loss, said


def plain_ppo(model, rows, config, clip):
    """The same as torch operations whose gradient torch finds by itself."""
    logp, entropy, value = forward(model, rows)
    keep = torch.ones_like(logp, dtype=torch.bool) if rows.mask is None else rows.mask
    logp, entropy, value = logp[keep], entropy[keep], value[keep]
    advantage = rows.advantages[keep]
    if config.normalize_advantage:
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    ratio = (logp - rows.old_log_prob[keep]).exp()
    policy = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
    error = (value - rows.returns[keep]).square()
    if config.clip_range_vf is not None:
        old = rows.old_values[keep]
        near = old + (value - old).clamp(-config.clip_range_vf, config.clip_range_vf)
        error = torch.max(error, (near - rows.returns[keep]).square())
    return policy + config.vf_coef * 0.5 * error.mean() - config.ent_coef * entropy.mean()


@pytest.mark.parametrize(("name", "space", "net"), cases(["ppo"], cores=(LSTM, GRU)))
@pytest.mark.parametrize("clip_value", [None, 0.2])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_the_ppo_loss_and_its_gradient_are_the_papers(name, space, net, clip_value, normalize, path):
    settings = {"clip_range_vf": clip_value, "normalize_advantage": normalize, "ent_coef": 0.03, "vf_coef": 0.7}
    algo, model = make(name, space, clip_coef=0.15, **settings, **({"net": net} if net else {}))
    rows = disturbed(algo.prepare(model, batch_for(algo, model, fault=0.1)))
    output, found = learned(algo, model, rows, path)
    loss, said = literal_ppo(model, rows, algo.config, 0.15)
    assert 0.1 < said["loss/clip_fraction"] < 0.9
    assert number(output.loss) == pytest.approx(loss, rel=1e-4, abs=1e-5)
    for key, value in said.items():
        assert number(output.metrics[key]) == pytest.approx(value, rel=1e-4, abs=1e-5), key
    expected = gradients(plain_ppo(model, rows, algo.config, 0.15), model)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-4)


def one_row(algo, model, **changes):
    """A single row of experience with these numbers in it."""
    rows = algo.prepare(model, batch_for(algo, model, length=1, width=1, end=0.0))
    for name, value in changes.items():
        setattr(rows, name, torch.as_tensor([value], dtype=torch.float32))
    return rows


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "moves"),
    [
        (0.0, 1.0, True),
        (0.0, -1.0, True),
        (0.5, 1.0, False),  # already more likely than the clip allows, and it should become more so
        (0.5, -1.0, True),
        (-0.5, 1.0, True),
        (-0.5, -1.0, False),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_the_clip_stops_only_what_goes_further_away(log_ratio, advantage, moves, path):
    algo, model = make("ppo", ent_coef=0.0, vf_coef=0.0)
    rows = one_row(algo, model, advantages=advantage)
    rows.old_log_prob = (evaluate_actions(model, rows)[0] - log_ratio).detach()
    _, found = learned(algo, model, rows, path)
    assert (sum(float(g.abs().sum()) for g in found) > 1e-6) == moves


@pytest.mark.parametrize(
    ("old", "target", "error", "moves"),
    [
        (0.0, 5.0, "own", True),  # within the clip
        (-1.0, 5.0, "clipped", False),  # moved by 1 towards the target already: enough
        (-1.0, -5.0, "own", True),  # moved by 1 away from the target: it may come back
        (1.0, 5.0, "own", True),
        (1.0, -5.0, "clipped", False),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_the_value_clip_is_around_the_old_value_and_keeps_a_gradient(old, target, error, moves, path):
    algo, model = make("ppo", ent_coef=0.0, clip_range_vf=0.5, vf_coef=1.0)
    rows = one_row(algo, model, advantages=0.0)
    value = float(evaluate_actions(model, rows)[2].detach())
    rows.old_values, rows.returns = torch.tensor([value + old]), torch.tensor([value + target])
    output, found = learned(algo, model, rows, path)
    near = value + old + np.clip(-old, -0.5, 0.5)
    expected = {"own": target**2, "clipped": (near - value - target) ** 2}[error]
    assert number(output.metrics["loss/value"]) == pytest.approx(0.5 * expected, rel=1e-4)
    assert (sum(float(g.abs().sum()) for g in found) > 1e-6) == moves


@pytest.mark.parametrize("path", PATHS)
def test_without_a_value_clip_a_far_value_is_not_bound(path):
    algo, model = make("ppo", ent_coef=0.0)
    rows = one_row(algo, model, advantages=0.0, returns=1e3, old_values=-1e3)
    assert sum(float(g.abs().sum()) for g in learned(algo, model, rows, path)[1]) > 100


@pytest.mark.parametrize("path", PATHS)
def test_the_clip_falls_with_progress_when_asked_to(path):
    algo, model = make("ppo", clip_coef="0.4:0")
    rows = disturbed(algo.prepare(model, batch_for(algo, model)))
    for progress in (0.0, 0.5, 0.75):
        expected, _ = literal_ppo(model, rows, algo.config, 0.4 * (1 - progress))
        output, _ = learned(algo, model, rows, path, progress)
        assert number(output.loss) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_a_policy_that_moved_too_far_stops_the_epochs(path):
    algo, model = make("ppo", target_kl=0.01)
    rows = algo.prepare(model, batch_for(algo, model))
    assert not learned(algo, model, rows, path)[0].stop
    output, _ = learned(algo, model, disturbed(rows), path)
    assert number(output.metrics["loss/kl"]) > 0.015
    assert output.stop


@pytest.mark.parametrize("minibatches", [1, 3, 4])
def test_every_row_is_used_once_per_epoch_in_a_new_order(minibatches):
    algo, model = make("ppo", update_epochs=3, num_minibatches=minibatches)
    rows = algo.prepare(model, batch_for(algo, model))
    rows.returns = torch.arange(48.0)
    parts = list(algo.minibatches(rows, torch.Generator().manual_seed(0)))
    assert len(parts) == 3 * minibatches
    epochs = [torch.cat([p.returns for p in parts[k * minibatches : (k + 1) * minibatches]]) for k in range(3)]
    for epoch in epochs:
        assert torch.equal(epoch.sort().values, rows.returns)
    assert not torch.equal(epochs[0], epochs[1])
    for part in parts:
        rows_of_part = part.returns.long()
        assert torch.equal(part.obs, rows.obs[rows_of_part])
        assert torch.equal(part.old_log_prob, rows.old_log_prob[rows_of_part])


def test_with_a_memory_minibatches_are_whole_sequences():
    algo, model = make("ppo", update_epochs=1, num_minibatches=2, net=LSTM)
    rows = algo.prepare(model, batch_for(algo, model))
    rows.returns = torch.arange(4.0).expand(12, 4).contiguous()
    parts = list(algo.minibatches(rows, torch.Generator().manual_seed(0)))
    assert [part.returns.shape for part in parts] == [(12, 2), (12, 2)]
    for part in parts:
        columns = part.returns[0].long()
        assert torch.equal(part.state, rows.state[columns])
        assert torch.equal(part.obs, rows.obs[:, columns])
        assert torch.equal(part.first, rows.first[:, columns])


def policy_gradient(model, rows, normalize, value_coef, entropy_coef, lib):
    logp, entropy, value = forward(model, rows)
    keep = torch.ones_like(logp, dtype=torch.bool) if rows.mask is None else rows.mask
    logp, entropy, value = logp[keep], entropy[keep], value[keep]
    advantage, target = rows.advantages[keep], rows.returns[keep]
    if lib is np:
        logp, entropy, value, advantage, target = map(numpy_of, (logp, entropy, value, advantage, target))
        if normalize:
            advantage = (advantage - np.mean(advantage)) / (np.std(advantage) + 1e-8)
        terms = [
            -logp[i] * advantage[i] + value_coef * 0.5 * (value[i] - target[i]) ** 2 - entropy_coef * entropy[i]
            for i in range(len(logp))
        ]
        return sum(terms) / len(terms)
    if normalize:
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    return (-logp * advantage + value_coef * 0.5 * (value - target) ** 2 - entropy_coef * entropy).mean()


def assert_policy_gradient(algo, model, rows, normalize, value_coef, path):
    output, found = learned(algo, model, rows, path)
    expected = policy_gradient(model, rows, normalize, value_coef, algo.config.ent_coef, np)
    assert number(output.loss) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    plain = policy_gradient(model, rows, normalize, value_coef, algo.config.ent_coef, torch)
    for mine, theirs in zip(found, gradients(plain, model), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(("name", "space", "net"), cases(["a2c"], cores=(LSTM, GRU)))
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_the_a2c_loss_and_its_gradient_are_the_papers(name, space, net, normalize, path):
    settings = {"net": net} if net else {}
    algo, model = make(name, space, ent_coef=0.02, vf_coef=0.6, normalize_advantage=normalize, **settings)
    rows = algo.prepare(model, batch_for(algo, model, fault=0.1))
    assert_policy_gradient(algo, model, rows, normalize, 0.6, path)


def episodes_for(algo, model, count=6, seed=0):
    """Whole episodes from the store, padded as it does it, and the fragments they came from."""
    store = EpisodeStore(algo.spec, algo.data, 4)
    policy = algo.make_policy(model, explore=True, rng=np.random.default_rng(seed))
    traj = act_on(experience(algo.spec, 60, 4, seed, end=0.12, fault=0.05), policy, algo.spec)
    store.put(traj)
    return store.get().batch


@pytest.mark.parametrize("space", SPECS)
@pytest.mark.parametrize("baseline", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_the_reinforce_loss_is_over_whole_episodes_and_no_padding(space, baseline, normalize, path):
    algo, model = make(
        "reinforce",
        space,
        baseline=baseline,
        normalize_advantage=normalize,
        gamma=0.9,
        ent_coef=0.02,
        episodes_per_update=6,
    )
    batch = episodes_for(algo, model)
    lengths = (~batch.faulty).sum(0)
    assert len(set(lengths)) > 2
    rows = algo.prepare(model, batch)
    assert len(rows.returns) == lengths.sum()
    value, after = compute_values(model, batch)
    returns, advantages = np.zeros(batch.shape), np.zeros(batch.shape)
    for t, b in np.ndindex(*batch.shape):
        if t >= lengths[b]:
            continue
        end = lengths[b] - 1
        total = sum(0.9 ** (k - t) * batch.reward[k, b] for k in range(t, end + 1))
        if baseline and not batch.terminated[end, b]:
            total += 0.9 ** (end + 1 - t) * after[end, b]
        returns[t, b], advantages[t, b] = total, total - (value[t, b] if baseline else 0)
    keep = ~batch.faulty
    np.testing.assert_allclose(rows.returns, returns[keep], atol=1e-4)
    np.testing.assert_allclose(rows.advantages, advantages[keep], atol=1e-4)
    assert_policy_gradient(algo, model, rows, normalize, algo.config.vf_coef if baseline else 0.0, path)


# -- DQN -----------------------------------------------------------------------------------------------------------


def transitions_for(algo, seed=0):
    """Transitions as replay gives them, of episodes that end in every way."""
    store = ReplayStore(algo.spec, algo.data, 4, seed)
    for k in range(3):
        traj = experience(algo.spec, 30, 4, seed + k, end=0.15, fault=0.05)
        store.put(traj)
    return store.get().batch


@pytest.mark.parametrize("space", ["discrete", "multi_discrete"])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("prioritised", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_the_dqn_loss_regresses_to_the_value_of_the_best_next_action(space, double, dueling, prioritised, path):
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
    store = ReplayStore(algo.spec, algo.data, 4, 0)
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


def test_epsilon_is_the_share_of_random_actions_and_the_rest_are_the_best():
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


# -- the ratio -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "space", "net"), cases(["ppo"], cores=(LSTM, GRU)))
@pytest.mark.parametrize("path", PATHS)
def test_the_ratio_is_1_for_the_policy_that_acted(name, space, net, path):
    algo, model = make(name, space, **({"net": net} if net else {}))
    on_path(model, path)
    if model.log_std is not None:
        with torch.no_grad():
            model.log_std.fill_(1.0)
    traj = batch_for(algo, model, length=40)
    if model.actions.num_numbers:
        numbers = traj.extras["action"][..., model.actions.num_choices :]
        assert (np.abs(numbers) > 1).mean() > 0.3  # out of bounds
        leaves = traj.action if space == "box" else traj.action["b"]
        box = SPECS[space].action_space if space == "box" else SPECS[space].action_space["b"]
        assert leaves.min() == box.low.min()
        assert leaves.max() == box.high.max()
    rows = algo.prepare(model, traj)
    for part in [rows, *algo.minibatches(rows, torch.Generator().manual_seed(0))]:
        ratio = (log_prob(model, part) - part.old_log_prob).exp()
        assert number((ratio - 1).abs().max()) < 1e-5


def log_prob(model, rows):
    """By the path that the model learns on."""
    if model.numpy_towers is None:
        return evaluate_actions(model, rows)[0]
    params = model.numpy_params(rows.obs.numpy())
    return torch.from_numpy(model.actions.explicit(params, rows.action.numpy())[0])


@pytest.mark.parametrize(("name", "space", "net"), cases(["ppo"], cores=(LSTM,)))
def test_the_ratio_is_against_the_policy_that_acted_not_the_one_that_learns(name, space, net):
    algo, model = make(name, space, **({"net": net} if net else {}))
    traj = batch_for(algo, model)
    recorded = traj.extras["logp"].copy()
    randomize(model, seed=5, scale=0.3)  # somebody has updated the weights since
    rows = algo.prepare(model, traj)
    np.testing.assert_array_equal(rows.old_log_prob.reshape(-1), recorded.reshape(-1))
    now = literal_distribution(model, *_params(model, rows))[0].detach()
    ratio = (evaluate_actions(model, rows)[0] - rows.old_log_prob).exp().detach().numpy()
    np.testing.assert_allclose(ratio, np.exp(now.numpy() - recorded.reshape(now.shape)), rtol=1e-4)
    assert np.abs(ratio - 1).max() > 0.1


def _params(model, rows):
    params = model(rows.obs)[0] if rows.state is None else model.unroll(rows.obs, rows.state, rows.first)[0]
    return params, rows.action


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "space", "net"), cases(["ppo", "a2c"], cores=(LSTM, GRU)))
@pytest.mark.parametrize("path", PATHS)
def test_nothing_of_a_faulty_row_reaches_a_loss(name, space, net, path):
    algo, model = make(name, space, **({"net": net} if net else {}))
    traj = batch_for(algo, model, fault=0.15)
    other = copy.deepcopy(traj)
    rng = np.random.default_rng(1)
    bad = other.faulty
    assert bad.sum() > 3
    other.reward[bad] = rng.normal(size=bad.sum()) * 100
    other.extras["logp"][bad] += rng.normal(size=bad.sum())
    other.extras["action"][bad] = 0
    at = other.faulty[other.final_at[:, 0], other.final_at[:, 1]]
    other.final_obs[at] = rng.normal(size=other.final_obs[at].shape) * 10
    before = np.zeros_like(bad)  # the observation of a faulty row is the successor of the row before, if there is one
    before[1:] = ~traj.done[:-1] & ~bad[:-1]
    apart = bad & ~before
    other.obs[:-1][apart] += 1 if net is None else 0
    results = []
    on_path(model, path)
    for batch in (traj, other):
        output, found = learned(algo, model, algo.prepare(model, batch), path)
        results.append((number(output.loss), found))
    assert results[0][0] == results[1][0]
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", PATHS)
def test_padding_of_episodes_reaches_no_loss(path):
    algo, model = make("reinforce", episodes_per_update=6)
    on_path(model, path)
    batch = episodes_for(algo, model)
    other = copy.deepcopy(batch)
    pad = other.faulty
    other.reward[pad] = 7
    other.extras["logp"][pad] = -3
    other.extras["action"][pad] = 0
    other.obs[:-1][pad] += 5
    results = [learned(algo, model, algo.prepare(model, b), path) for b in (batch, other)]
    assert number(results[0][0].loss) == number(results[1][0].loss)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("name", ["ppo", "a2c"])
@pytest.mark.parametrize("net", [None, LSTM])
def test_a_batch_of_nothing_but_faults_changes_nothing(name, net):
    algo, model = make(name, **({"net": net} if net else {}))
    said = []
    learner = Learner(algo, model, torch.Generator(), Precision("fp32", ""), report=said.append)
    traj = batch_for(algo, model, length=1, width=2, end=0.0)
    traj.faulty[:] = traj.truncated[:] = True
    before = learner.flat.weights.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.step(Sample(traj), 0.0)
    assert torch.equal(learner.flat.weights, before)
    assert said == []


# -- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (ppo.Config, {"learning_rate": 0.0}),
        (ppo.Config, {"learning_rate": float("nan")}),
        (ppo.Config, {"gamma": 1.5}),
        (ppo.Config, {"gae_lambda": -0.1}),
        (ppo.Config, {"update_epochs": 0}),
        (ppo.Config, {"clip_coef": -0.1}),
        (ppo.Config, {"clip_range_vf": -0.5}),
        (ppo.Config, {"clip_range_vf": 0.0}),
        (ppo.Config, {"target_kl": -1.0}),
        (a2c.Config, {"num_steps": 0}),
        (a2c.Config, {"max_grad_norm": 0.0}),
        (reinforce.Config, {"episodes_per_update": 0}),
        (reinforce.Config, {"net": LSTM}),
        (dqn.Config, {"tau": 0.0}),
        (dqn.Config, {"exploration_final_eps": 1.5}),
        (dqn.Config, {"net": GRU}),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_sentence(config, settings):
    with pytest.raises(UserError) as caught:
        config(**settings)
    assert "\n" not in str(caught.value)


def test_dqn_refuses_numbers_and_says_what_to_use():
    for space in ("box", "hybrid"):
        with pytest.raises(UserError, match="use ppo or a2c"):
            dqn.Dqn(dqn.Config(), SPECS[space], 1)


def test_on_policy_slices_of_a_batch_give_the_same_rows():
    algo, model = make("a2c")
    traj = batch_for(algo, model)
    whole = algo.prepare(model, traj)
    columns = np.array([2, 0])
    part = algo.prepare(model, slice_envs(traj, columns))
    target = whole.returns.reshape(traj.shape)[:, columns].reshape(-1)
    torch.testing.assert_close(part.returns, target, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_trees_of_observations_go_through_every_loss(path):
    space = spaces.Dict({"a": spaces.Box(-9, 9, (2,), np.float32), "b": spaces.Box(-9, 9, (), np.float64)})
    spec = EnvSpec(space, spaces.Discrete(3))
    for kind, config in ON_POLICY.values():
        algo = kind(config(), spec, 4)
        model = algo.build_model()
        rows = algo.prepare(model, batch_for(algo, model))
        assert np.isfinite(number(learned(algo, model, rows, path)[0].loss))
    algo = dqn.Dqn(dqn.Config(batch_size=8, learning_starts=8), spec, 4)
    traj = experience(spec)
    flat = tree_map(lambda leaf: leaf[:-1, 0], traj.obs)
    after = tree_map(lambda leaf: leaf[1:, 0], traj.obs)
    batch = Transitions(flat, traj.action[:, 0], traj.reward[:, 0], np.ones(12, np.float32), after, np.ones(12))
    model = algo.build_model()
    assert np.isfinite(number(learned(algo, model, batch, path, target=algo.build_model())[0].loss))
