"""The losses of A2C and REINFORCE against a literal version."""

import numpy as np
import pytest
import torch
from helpers.batches import SPECS, batch_for, gradients, learned
from helpers.literal_losses import (
    GRU,
    LSTM,
    PATHS,
    cases,
    episodes_for,
    forward,
    make,
    number,
    numpy_of,
)

from corral.algos.trajectories import compute_values


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


@pytest.mark.parametrize("space", SPECS)
@pytest.mark.parametrize("baseline", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_reinforce_loss_ignores_padding(space, baseline, normalize, path):
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
