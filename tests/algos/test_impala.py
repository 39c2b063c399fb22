"""IMPALA's loss against its paper, written out row by row, and what must not change it."""

import copy
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.batches import SPECS, batch_for, gradients, learned, observe, on_path, randomize
from helpers.reference.vtrace import literal_vtrace, rows_one_by_one, stale

from corral.algos import impala
from corral.algos.trajectories import forward_sequences
from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.core.types import EnvSpec, Sample, cat
from corral.learn.device import Precision
from corral.learn.learner import Learner
from corral.nets.config import NetConfig
from corral.ops.optim import SmallRmsprop, rmsprop
from corral.ops.returns import nstep_return
from corral.topologies.sync import Sync

PATHS = ["torch", "numpy"]
CORES = {
    "plain": NetConfig(hidden_sizes=(16, 8)),
    "relu": NetConfig(hidden_sizes=(16,), activation="relu"),
    "lstm": NetConfig(hidden_sizes=(8,), rnn="lstm", rnn_size=6),
    "gru": NetConfig(hidden_sizes=(8,), rnn="gru", rnn_size=6),
}


def make(space="discrete", core="plain", **settings):
    settings = {"num_steps": 12, "batch_size": 4, "net": CORES[core]} | settings
    algo = impala.Impala(impala.Config(**settings), SPECS[space], 4)
    return algo, randomize(algo.build_model(), scale=0.3)


def number(value):
    return float(torch.as_tensor(value).detach())


def literal_loss(algo, model, traj):
    """Sums over all rows that happened; its gradient is torch's own."""
    config = algo.config
    params, value, after = rows_one_by_one(model, traj)
    logp, entropy = model.actions.evaluate(params, torch.from_numpy(traj.extras["action"]))
    log_ratio = logp.detach().double().numpy() - traj.extras["logp"]
    ratio = np.exp(log_ratio) if config.vtrace else np.ones(traj.shape)
    target, gain = literal_vtrace(
        traj, ratio, value.detach().numpy(), after, config.gamma, config.vtrace_rho, config.vtrace_c
    )
    advantage = np.minimum(config.vtrace_rho, ratio) * gain
    terms = []
    for t, b in np.ndindex(*traj.shape):
        if not traj.faulty[t, b]:
            error = 0.5 * (value[t, b] - float(target[t, b])) ** 2
            terms.append(
                -logp[t, b] * float(advantage[t, b]) + config.vf_coef * error - config.ent_coef * entropy[t, b]
            )
    return sum(terms), ratio[~traj.faulty]


@pytest.mark.parametrize(
    ("space", "core"), [*((s, c) for s in SPECS for c in ("plain", "relu")), ("hybrid", "lstm"), ("hybrid", "gru")]
)
@pytest.mark.parametrize("bars", [(1.0, 1.0), (2.0, 0.7)])
@pytest.mark.parametrize("path", PATHS)
def test_the_loss_and_its_gradient_are_the_papers(space, core, bars, path):
    algo, model = make(space, core, gamma=0.9, ent_coef=0.03, vf_coef=0.7, vtrace_rho=bars[0], vtrace_c=bars[1])
    traj = stale(algo, model, fault=0.1, end=0.12)
    assert traj.faulty.any()
    assert traj.terminated.any()
    assert (traj.truncated & ~traj.terminated & ~traj.faulty).any()
    output, found = learned(algo, model, traj, path)
    expected, ratio = literal_loss(algo, model, traj)
    assert (ratio < 0.95).any()
    assert (ratio > 1.05).any()
    assert number(output.loss) == pytest.approx(number(expected), rel=1e-4, abs=1e-4)
    for mine, theirs in zip(found, gradients(expected, model), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("space", SPECS)
@pytest.mark.parametrize("vtrace", [True, False])
@pytest.mark.parametrize("normalize_obs", [False, True])
def test_both_paths_are_equal(space, vtrace, normalize_obs):
    net = NetConfig(hidden_sizes=(16, 8), normalize_obs=normalize_obs)
    algo, model = make(space, vtrace=vtrace, net=net)
    traj = stale(algo, model, fault=0.05)
    observe(model.encoder, torch.from_numpy(traj.obs.reshape(-1, 3)))
    (plain, by_torch), (lean, by_numpy) = (learned(algo, model, traj, path) for path in PATHS)
    assert plain.backward is None
    assert lean.backward is not None
    assert plain.metrics.keys() == lean.metrics.keys()
    for name, value in plain.metrics.items():
        assert lean.metrics[name] == pytest.approx(number(value), rel=1e-5, abs=1e-5), name
    for a, b in zip(by_torch, by_numpy, strict=True):
        scale = max(1.0, float(a.abs().max()))
        torch.testing.assert_close(a / scale, b / scale, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_uncorrected_loss_treats_old_data_as_on_policy(path):
    algo, model = make(vtrace=False)
    traj = stale(algo, model)
    output, found = learned(algo, model, traj, path)
    expected, _ = literal_loss(algo, model, traj)
    assert number(output.loss) == pytest.approx(number(expected), rel=1e-4)
    traj.extras["logp"] += 1.0
    for a, b in zip(found, learned(algo, model, traj, path)[1], strict=True):
        assert torch.equal(a, b)
    corrected, _ = make()
    difference = [(a - b).abs().max() for a, b in zip(found, learned(corrected, model, traj, path)[1], strict=True)]
    assert max(difference) > 0.1


@pytest.mark.parametrize("core", ["plain", "lstm"])
def test_on_policy_unclipped_targets_are_n_step_returns(core):
    algo, model = make(core=core, gamma=0.9, vtrace_rho=float("inf"), vtrace_c=float("inf"))
    traj = batch_for(algo, model, fault=0.05)
    seen = forward_sequences(model, traj)
    value = seen.values.detach().numpy()
    target, advantage = algo.vtrace(traj, seen.log_prob.detach().numpy(), value, seen.next_values.numpy())
    returns = nstep_return(traj.reward, seen.next_values.numpy(), traj.terminated, traj.truncated, traj.faulty, 0.9, 12)
    keep = ~traj.faulty
    np.testing.assert_allclose(target[keep], returns[keep], atol=1e-4)
    np.testing.assert_allclose(advantage[keep], (returns - value)[keep], atol=1e-4)


@pytest.mark.parametrize("space", SPECS)
@pytest.mark.parametrize("core", ["plain", "gru"])
@pytest.mark.parametrize("path", PATHS)
def test_the_first_update_on_fresh_data_has_ratio_1(space, core, path):
    algo, model = make(space, core)
    on_path(model, path)
    traj = batch_for(algo, model, length=30)
    output, _ = learned(algo, model, traj, path)
    assert number(output.metrics["loss/kl"]) == pytest.approx(0, abs=1e-6)
    if path == "torch":
        np.testing.assert_allclose(
            forward_sequences(model, traj).log_prob.detach().numpy(), traj.extras["logp"], atol=1e-5
        )


@pytest.mark.parametrize("core", ["plain", "lstm"])
@pytest.mark.parametrize("path", PATHS)
def test_loss_is_a_sum_over_batches(core, path):
    algo, model = make(core=core)
    a, b = stale(algo, model, seed=0, fault=0.05), stale(algo, model, seed=1)
    parts = [learned(algo, model, traj, path)[1] for traj in (a, b)]
    _, whole = learned(algo, model, cat([a, b]), path)
    for x, y, z in zip(*parts, whole, strict=True):
        torch.testing.assert_close(x + y, z, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("core", ["plain", "gru"])
@pytest.mark.parametrize("path", PATHS)
def test_bootstrap_after_truncation_but_not_termination(core, path):
    algo, model = make(core=core)
    on_path(model, path)
    traj = batch_for(algo, model, end=0.0)
    traj.truncated[5, 0] = True
    traj.terminated[7, 2] = True
    traj.first[6, 0] = traj.first[8, 2] = True
    traj.final_at = np.array([[5, 0], [7, 2]])
    traj.final_obs = np.stack([traj.obs[6, 0], traj.obs[8, 2]])

    def loss(row):
        other = copy.deepcopy(traj)
        if row is not None:
            other.final_obs[row] += 2.0
        return number(learned(algo, model, other, path)[0].loss)

    assert loss(0) != pytest.approx(loss(None), rel=1e-4)
    assert loss(1) == loss(None)


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
    assert number(results[0][0].loss) == number(results[1][0].loss)
    assert {k: number(v) for k, v in results[0][0].metrics.items()} == {
        k: number(v) for k, v in results[1][0].metrics.items()
    }
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("core", ["plain", "lstm"])
def test_a_batch_of_nothing_but_faults_changes_nothing(core):
    algo, model = make(core=core)
    said = []
    learner = Learner(algo, model, torch.Generator(), Precision("fp32", ""), report=said.append)
    traj = batch_for(algo, model, length=1, width=2, end=0.0)
    traj.faulty[:] = traj.truncated[:] = True
    before = learner.flat.weights.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert learner.step(Sample(traj), 0.0) == []
    assert torch.equal(learner.flat.weights, before)
    assert said == []


@pytest.mark.parametrize("path", PATHS)
def test_trees_of_observations_go_through_the_loss(path):
    space = spaces.Dict({"a": spaces.Box(-9, 9, (2,), np.float32), "b": spaces.Box(-9, 9, (), np.float64)})
    algo = impala.Impala(impala.Config(), EnvSpec(space, spaces.Discrete(3)), 4)
    model = algo.build_model()
    traj = batch_for(algo, model)
    output, found = learned(algo, model, traj, path)
    expected, _ = literal_loss(algo, model, traj)
    assert number(output.loss) == pytest.approx(number(expected), rel=1e-4)
    assert sum(float(g.abs().sum()) for g in found) > 0


def test_the_optimizer_is_rmsprop_with_the_papers_constants():
    algo, _ = make()
    torch.manual_seed(3)
    start = torch.randn(50)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    small = algo.groups()[0].optimizer([ours])
    reference = torch.optim.RMSprop([theirs], algo.config.learning_rate, alpha=0.99, eps=0.01)
    assert isinstance(small, SmallRmsprop)
    for k in range(60):
        grad = torch.randn(50) * 10 ** torch.randn(())
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        small.step()
        reference.step()
        if k == 30:
            again = algo.groups()[0].optimizer([ours])
            again.load_state_dict(small.state_dict())
            small = again
    torch.testing.assert_close(ours.data, theirs.data, atol=1e-6, rtol=1e-5)
    large = rmsprop([torch.nn.Parameter(torch.zeros(300_000))], 1e-3, 0.99, 0.01)
    assert isinstance(large, torch.optim.RMSprop)


def test_run_with_replay_resumes_exactly():
    settings = {
        "num_envs": 4,
        "num_steps": 8,
        "batch_size": 8,
        "replay_fraction": 0.5,
        "buffer_size": 10,
        "backend": "local",
    }
    experiment = Experiment.make("impala", "CartPole-v1", preset="none", overrides={**settings, "device": "cpu"})
    first, second = (Sync(experiment, lambda kind, text: None) for _ in range(2))
    try:
        for _ in range(9):
            first.advance()
        assert second.load_state_dict(first.state_dict()) == []
        for _ in range(9):
            first.advance()
            second.advance()
            assert torch.equal(first.learner.flat.weights, second.learner.flat.weights)
        assert first.store.metrics() == second.store.metrics()
        assert first.learner.version == 18
    finally:
        first.close()
        second.close()


def test_data_spec():
    algo, _ = make(replay_fraction=0.5, buffer_size=77, max_policy_lag=9)
    data = algo.data
    assert (data.unit, data.reuse, data.length, data.batch_size) == ("sequence", "once", 12, 4)
    assert (data.replayed, data.capacity, data.max_lag) == (0.5, 77, 9)
    assert {"action", "logp"} <= set(data.extras)


@pytest.mark.parametrize(
    "settings",
    [{"learning_rate": 0.0}, {"gamma": 1.5}, {"num_steps": 0}, {"batch_size": 0}, {"replay_fraction": 1.0},
        {"replay_fraction": -0.1},
     {"buffer_size": 0}, {"vtrace_rho": 0.0}, {"vtrace_c": float("nan")}, {"max_grad_norm": 0.0},
     {"max_policy_lag": 0}],
)  # fmt: skip
def test_invalid_settings_are_refused(settings):
    with pytest.raises(UserError) as caught:
        impala.Config(**settings)
    assert "\n" not in str(caught.value)
