"""APPO's loss against its definition, written out row by row, and what must not change it."""

import copy
import warnings

import numpy as np
import pytest
import torch
from helpers.batches import SPECS, batch_for, gradients, learned, observe, on_path, randomize
from helpers.reference.vtrace import literal_vtrace, rows_one_by_one, stale

from corral.algos import appo
from corral.algos.trajectories import forward_sequences
from corral.core.errors import UserError
from corral.core.types import Sample
from corral.learn.device import Precision
from corral.learn.learner import Learner
from corral.nets.config import NetConfig
from corral.ops.returns import nstep_return

PATHS = ["torch", "numpy"]
CORES = {
    "plain": NetConfig(hidden_sizes=(16, 8)),
    "lstm": NetConfig(hidden_sizes=(8,), rnn="lstm", rnn_size=6),
    "gru": NetConfig(hidden_sizes=(8,), rnn="gru", rnn_size=6),
}


def make(space="discrete", core="plain", **settings):
    settings = {"num_steps": 12, "batch_size": 4, "net": CORES[core]} | settings
    algo = appo.Appo(appo.Config(**settings), SPECS[space], 4)
    return algo, randomize(algo.build_model(), scale=0.3)


def number(value):
    return float(torch.as_tensor(value).detach())


def literal_loss(algo, model, traj):
    """A mean over the rows that happened, and the share of their ratios beyond the clip."""
    config = algo.config
    params, value, after = rows_one_by_one(model, traj)
    logp, entropy = model.actions.evaluate(params, torch.from_numpy(traj.extras["action"]))
    ratio = torch.exp(logp - torch.from_numpy(traj.extras["logp"]))
    target, gain = literal_vtrace(
        traj, ratio.detach().double().numpy(), value.detach().numpy(), after,
        config.gamma, config.vtrace_rho, config.vtrace_c,
    )  # fmt: skip
    keep = ~traj.faulty
    if config.normalize_advantage:
        gain = (gain - gain[keep].mean()) / (gain[keep].std() + 1e-8)
    terms, beyond = [], 0
    for t, b in zip(*np.nonzero(keep), strict=True):
        advantage, r = float(gain[t, b]), ratio[t, b]
        surrogate = torch.minimum(r * advantage, r.clamp(1 - config.clip_coef, 1 + config.clip_coef) * advantage)
        error = 0.5 * (value[t, b] - float(target[t, b])) ** 2
        terms.append(-surrogate + config.vf_coef * error - config.ent_coef * entropy[t, b])
        beyond += abs(number(r) - 1) > config.clip_coef
    return sum(terms) / len(terms), beyond / len(terms)


@pytest.mark.parametrize(
    ("space", "core"), [*((space, "plain") for space in SPECS), ("hybrid", "lstm"), ("hybrid", "gru")]
)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_the_loss_and_its_gradient_are_as_defined(space, core, normalize, path):
    settings = {"ent_coef": 0.03, "vf_coef": 0.7, "vtrace_rho": 1.2, "vtrace_c": 0.9, "clip_coef": 0.1, "gamma": 0.9}
    algo, model = make(space, core, normalize_advantage=normalize, **settings)
    traj = stale(algo, model, fault=0.1, end=0.12)
    assert traj.faulty.any()
    output, found = learned(algo, model, traj, path)
    expected, beyond = literal_loss(algo, model, traj)
    assert 0.05 < beyond < 0.95
    assert number(output.loss) == pytest.approx(number(expected), rel=1e-4, abs=1e-5)
    assert number(output.metrics["loss/clip_fraction"]) == pytest.approx(beyond)
    for mine, theirs in zip(found, gradients(expected, model), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("space", SPECS)
@pytest.mark.parametrize("normalize_obs", [False, True])
def test_both_paths_are_equal(space, normalize_obs):
    algo, model = make(space, net=NetConfig(hidden_sizes=(16, 8), normalize_obs=normalize_obs))
    traj = stale(algo, model, fault=0.05)
    observe(model.encoder, torch.from_numpy(traj.obs.reshape(-1, 3)))
    (plain, by_torch), (lean, by_numpy) = (learned(algo, model, traj, path) for path in PATHS)
    assert plain.backward is None
    assert lean.backward is not None
    assert plain.metrics.keys() == lean.metrics.keys()
    for name, value in plain.metrics.items():
        assert lean.metrics[name] == pytest.approx(number(value), rel=1e-5, abs=1e-5), name
    for a, b in zip(by_torch, by_numpy, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_the_ratio_counts_once():
    """The surrogate has the ratio, so advantages come without it: with no value to learn they are the returns."""
    algo, model = make(gamma=0.9, vtrace_rho=float("inf"), vtrace_c=float("inf"))
    traj = batch_for(algo, model)
    seen = forward_sequences(model, traj)
    value, logp, after = seen.values.detach().numpy(), seen.log_prob.detach().numpy(), seen.next_values.numpy()
    _, advantage = algo.vtrace(traj, logp, value, after)
    returns = nstep_return(traj.reward, after, traj.terminated, traj.truncated, traj.faulty, 0.9, 12)
    np.testing.assert_allclose(advantage, returns - value, atol=1e-4)
    traj.extras["logp"][-1] -= 1.0  # of the last row nothing follows: only its own ratio could matter
    np.testing.assert_array_equal(algo.vtrace(traj, logp, value, after)[1][-1], advantage[-1])


@pytest.mark.parametrize("space", SPECS)
@pytest.mark.parametrize("core", ["plain", "lstm"])
@pytest.mark.parametrize("path", PATHS)
def test_the_first_update_on_fresh_data_has_ratio_1(space, core, path):
    algo, model = make(space, core, num_minibatches=3)
    on_path(model, path)
    traj = batch_for(algo, model, length=30)
    for part in algo.minibatches(traj, torch.Generator().manual_seed(0)):
        metrics = learned(algo, model, part, path)[0].metrics
        assert number(metrics["loss/kl"]) == pytest.approx(0, abs=1e-6)
        assert number(metrics["loss/clip_fraction"]) == 0


@pytest.mark.parametrize("core", ["plain", "gru"])
def test_epochs_use_every_sequence_once_reshuffled(core):
    algo, model = make(core=core, update_epochs=3, num_minibatches=2)
    traj = batch_for(algo, model, width=6)
    parts = list(algo.minibatches(traj, torch.Generator().manual_seed(0)))
    assert [part.shape for part in parts] == [(12, 3)] * 6
    epochs = [[*a.env_id, *b.env_id] for a, b in zip(parts[::2], parts[1::2], strict=True)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    for part in parts:
        np.testing.assert_array_equal(part.extras["logp"], traj.extras["logp"][:, part.env_id])
        for k, (t, b) in enumerate(part.final_at):
            at = np.flatnonzero((traj.final_at == [t, part.env_id[b]]).all(1))
            np.testing.assert_array_equal(part.final_obs[k], traj.final_obs[at[0]])
    whole, _ = make(core=core, update_epochs=2)
    assert all(part is traj for part in whole.minibatches(traj, torch.Generator()))


def test_sequences_of_nothing_but_faults_are_in_no_minibatch():
    algo, model = make(num_minibatches=2)
    traj = batch_for(algo, model)
    traj.faulty[:, 1] = traj.truncated[:, 1] = True
    parts = list(algo.minibatches(traj, torch.Generator().manual_seed(0)))
    assert sorted(np.concatenate([part.env_id for part in parts])) == [0, 2, 3]
    learner = Learner(algo, model, torch.Generator(), Precision("fp32", ""))
    before = learner.flat.weights.detach().clone()
    traj.faulty[:] = traj.truncated[:] = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert learner.step(Sample(traj), 0.0) == []
    assert torch.equal(learner.flat.weights, before)


@pytest.mark.parametrize(("space", "core"), [("discrete", "plain"), ("hybrid", "plain"), ("hybrid", "lstm")])
@pytest.mark.parametrize("path", PATHS)
def test_nothing_of_a_faulty_row_reaches_the_loss(space, core, path):
    algo, model = make(space, core)
    traj = stale(algo, model, fault=0.15)
    other, rng = copy.deepcopy(traj), np.random.default_rng(1)
    bad = other.faulty
    assert bad.sum() > 3
    other.reward[bad] = rng.normal(size=bad.sum()) * 100
    other.extras["logp"][bad] += rng.normal(size=bad.sum())
    other.extras["action"][bad] = 0
    at = other.faulty[other.final_at[:, 0], other.final_at[:, 1]]
    other.final_obs[at] = rng.normal(size=other.final_obs[at].shape) * 10
    on_path(model, path)
    results = [learned(algo, model, batch, path) for batch in (traj, other)]
    for name, value in results[0][0].metrics.items():
        assert number(value) == number(results[1][0].metrics[name]), name
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b)


def test_lag_bound_counts_batches_not_minibatches():
    algo, _ = make(update_epochs=3, num_minibatches=2, max_policy_lag=5)
    assert algo.data.max_lag == 30
    model = algo.build_model()
    learner = Learner(algo, model, torch.Generator(), Precision("fp32", ""))
    learner.step(Sample(batch_for(algo, model)), 0.0)
    assert learner.version == 6


@pytest.mark.parametrize(
    "settings",
    [{"learning_rate": 0.0}, {"gamma": 1.5}, {"num_steps": 0}, {"batch_size": 0}, {"update_epochs": 0},
        {"num_minibatches": 0},
     {"clip_coef": 0.0}, {"vtrace_rho": 0.0}, {"vtrace_c": float("nan")}, {"max_grad_norm": 0.0},
     {"max_policy_lag": 0}],
)  # fmt: skip
def test_invalid_settings_are_refused(settings):
    with pytest.raises(UserError) as caught:
        appo.Config(**settings)
    assert "\n" not in str(caught.value)
