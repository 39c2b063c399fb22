"""The loss of PPO against a literal version: clips, epochs and minibatches."""

import numpy as np
import pytest
import torch
from helpers.batches import batch_for, gradients, learned
from helpers.literal_losses import (
    GRU,
    LSTM,
    PATHS,
    cases,
    forward,
    make,
    number,
    numpy_of,
)

from corral.algos.trajectories import evaluate_actions


def counted(tensor, rows):
    """The values of the rows that count, in a line, as float64."""
    flat = numpy_of(tensor)
    return flat.reshape(-1) if rows.mask is None else flat[rows.mask.numpy()]


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
def test_clip_stops_only_moves_away(log_ratio, advantage, moves, path):
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
def test_value_clip_is_around_old_value(old, target, error, moves, path):
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


def test_recurrent_minibatches_are_whole_sequences():
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
