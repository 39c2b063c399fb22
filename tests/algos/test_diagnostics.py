"""The usual diagnostics are in the metrics of every actor-critic."""

import math

import numpy as np
import pytest
import torch
from helpers.batches import batch_for
from helpers.literal_losses import make

from corral.algos.trajectories import explained_variance
from corral.config.experiment import Experiment
from corral.nets.config import NetConfig
from corral.topologies.sync import Sync

USUAL = {"loss/policy", "loss/value", "loss/entropy", "loss/grad_norm", "loss/explained_variance"}


def test_explained_variance_is_the_textbook_one():
    rng = np.random.default_rng(0)
    returns = (1000 + rng.standard_normal(256)).astype(np.float32)
    for values in (returns, returns + 5, rng.standard_normal(256).astype(np.float32), returns * 0.5):
        expected = 1 - np.var(returns.astype(np.float64) - values) / np.var(returns.astype(np.float64))
        assert explained_variance(values, returns) == pytest.approx(expected, abs=1e-3)
    assert explained_variance(np.full(256, 3, np.float32), returns) == pytest.approx(0, abs=1e-6)
    assert math.isnan(explained_variance(returns, np.ones(256, np.float32)))
    assert math.isnan(explained_variance(returns[:0], returns[:0]))


@pytest.mark.parametrize("rnn", ["none", "lstm"])
def test_faulty_steps_do_not_count_in_the_explained_variance(rnn):
    algo, model = make("ppo", net=NetConfig(hidden_sizes=(8,), rnn=rnn, rnn_size=4))
    traj = batch_for(algo, model, fault=0.2)
    batch = algo.prepare(model, traj)
    keep = torch.from_numpy(traj.valid) if batch.mask is not None else slice(None)
    expected = explained_variance(batch.old_values[keep].numpy(), batch.returns[keep].numpy())
    assert batch.explained_variance == expected
    assert len(batch.old_values[keep].flatten()) == traj.valid.sum() < traj.valid.size


@pytest.mark.parametrize(
    ("algo", "rnn"),
    [("ppo", "none"), ("ppo", "lstm"), ("a2c", "none"), ("reinforce", "none"), ("impala", "none"), ("impala", "lstm"),
     ("appo", "none")],
)  # fmt: skip
def test_actor_critics_report_the_usual_metrics(algo, rnn):
    more = {"ppo": {"loss/kl", "loss/clip_fraction"}, "appo": {"loss/kl", "loss/clip_fraction"}}
    check_metrics(algo, "CartPole-v1", USUAL | more.get(algo, set()), {"net.rnn": rnn})


def test_alphazero_reports_the_usual_metrics():
    settings = {"learning_starts": 64, "batch_size": 32, "num_simulations": 4, "hidden_sizes": (8, 8)}
    check_metrics("alphazero", "corral/TicTacToe-v0", USUAL | {"loss/policy_gap"}, settings)


def check_metrics(algo, env, expected, settings):
    settings = {
        "topology": "sync",
        "num_envs": 4,
        "backend": "local",
        "device": "cpu",
        "steps": 10_000,
        **settings,
    }
    experiment = Experiment.make(algo, env, preset="none", overrides=settings)
    topology = Sync(experiment, lambda kind, text: None)
    try:
        metrics = {}
        while not metrics and topology.env_steps < experiment.steps:
            metrics = topology.advance()
        assert metrics.keys() >= expected
        assert all(-1e9 < float(value) <= 1 for value in metrics["loss/explained_variance"])
        assert "learn/lr" in topology.metrics()
    finally:
        topology.close()
