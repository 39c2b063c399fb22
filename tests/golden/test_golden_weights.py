"""What K updates on fixed data make of fixed weights, for every algorithm: a change of the mathematics shows here.

Statistics and not hashes, because the last bits depend on the processor. When a change is meant, write them anew
with `PYTHONPATH=tests python tests/golden/test_golden_weights.py`, and say in the commit why they changed.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.batches import SPECS, experience, randomize

from corral.algos.registry import find_algorithm
from corral.core.types import Sample, Transitions
from corral.learn.device import Precision
from corral.learn.learner import Learner
from corral.nets.config import NetConfig

GOLDEN = Path(__file__).with_name("weights.json")
UPDATES = 6
SMALL = NetConfig(hidden_sizes=(16, 16))
CASES = {
    "ppo": ("ppo", "discrete", {"num_minibatches": 2, "update_epochs": 2, "net": SMALL}),
    "ppo-hybrid-clipped": ("ppo", "hybrid", {"num_minibatches": 2, "update_epochs": 2, "clip_range_vf": 0.2,
        "net": SMALL}),
    "ppo-lstm": ("ppo", "box", {"num_minibatches": 2, "net": NetConfig(hidden_sizes=(16,), rnn="lstm", rnn_size=8)}),
    "ppo-normalised": ("ppo", "multi_discrete", {"net": NetConfig(hidden_sizes=(16,), normalize_obs=True)}),
    "a2c": ("a2c", "discrete", {"ent_coef": 0.01, "net": SMALL}),
    "a2c-gru-adam": ("a2c", "hybrid", {"optimizer": "adam", "net": NetConfig(hidden_sizes=(), rnn="gru", rnn_size=8)}),
    "reinforce": ("reinforce", "box", {"net": SMALL}),
    "reinforce-no-baseline": ("reinforce", "discrete", {"baseline": False, "net": SMALL}),
    "impala": ("impala", "discrete", {"net": SMALL}),
    "impala-hybrid-adam": ("impala", "hybrid", {"optimizer": "adam", "vtrace_rho": 2.0, "vtrace_c": 0.9, "net": SMALL}),
    "impala-lstm": ("impala", "box", {"net": NetConfig(hidden_sizes=(16,), rnn="lstm", rnn_size=8)}),
    "appo": ("appo", "multi_discrete", {"num_minibatches": 2, "update_epochs": 2, "net": SMALL}),
    "appo-gru": ("appo", "hybrid", {"clip_coef": 0.1, "net": NetConfig(hidden_sizes=(), rnn="gru", rnn_size=8)}),
    "dqn": ("dqn", "discrete", {"target_update_period": 2, "net": NetConfig(hidden_sizes=(16, 16), activation="relu")}),
    "dqn-everything": ("dqn", "multi_discrete",
                       {"target_update_period": 1, "tau": 0.1, "dueling": "shared", "prioritized_replay": True,
                           "net": SMALL}),
    "dqn-dueling": ("dqn", "discrete", {"target_update_period": 2, "dueling": True, "net": SMALL}),
}  # fmt: skip


def recorded(algo, model, seed):
    """Experience with made-up records of acting, so that no rounding decides what was done."""
    traj = experience(algo.spec, seed=seed, fault=0.05)
    rng = np.random.default_rng(seed)
    shape, actions = traj.shape, model.actions
    choices = [rng.integers(0, size, shape) for size in actions.sizes]
    numbers = [rng.normal(size=shape) for _ in range(actions.num_numbers)]
    traj.extras = {
        "action": np.stack([*choices, *numbers], -1).astype(np.float32),
        "logp": rng.uniform(-2, -0.5, shape).astype(np.float32),
    }
    if model.recurrent:
        traj.extras["state"] = rng.normal(size=(*shape, model.core.state_size)).astype(np.float32)
    return Sample(traj)


def transitions(algo, seed, n=32):
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.normal(size=(2, n, 3)).astype(np.float32)
    discount = np.where(rng.random(n) < 0.2, 0, 0.97).astype(np.float32)
    action = algo.choices.to_env(rng.integers(0, algo.choices.count, n))
    reward, weight = rng.normal(size=n).astype(np.float32), rng.uniform(0.2, 1, n).astype(np.float32)
    return Sample(Transitions(obs, action, reward, discount, next_obs, weight))


def learn(case):
    name, space, settings = CASES[case]
    entry = find_algorithm(name)
    algo = entry.load()(entry.config()(**settings), SPECS[space], 4)
    model = randomize(algo.build_model(), scale=0.3)
    learner = Learner(algo, model, torch.Generator().manual_seed(0), Precision("fp32", ""))
    for k in range(UPDATES):
        sample = transitions(algo, k) if name == "dqn" else recorded(algo, model, k)
        learner.step(sample, k / UPDATES)
    return learner


def statistics(learner):
    """A few numbers that any wrong weight would change."""
    weights = np.concatenate([p.detach().numpy().reshape(-1) for p in learner.model.parameters()]).astype(np.float64)
    rng = np.random.default_rng(0)
    found = {"count": len(weights), "updates": learner.version, "norm": float(np.linalg.norm(weights))}
    found |= {f"along_{i}": float(weights @ rng.normal(size=len(weights))) for i in range(6)}
    moved = randomize(learner.algo.build_model(), scale=0.3)
    start = np.concatenate([p.detach().numpy().reshape(-1) for p in moved.parameters()])
    found["moved"] = float(np.linalg.norm(weights - start))
    if learner.target is not None:
        found["target"] = float(sum(p.detach().double().square().sum() for p in learner.target.parameters()))
    return found


@pytest.mark.parametrize("case", CASES)
def test_golden_weights(case):
    expected = json.loads(GOLDEN.read_text())[case]
    found = statistics(learn(case))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("case", CASES)
def test_the_same_updates_again_are_bit_equal(case):
    a, b = learn(case), learn(case)
    assert torch.equal(a.flat.weights, b.flat.weights)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({case: statistics(learn(case)) for case in CASES}, indent=1) + "\n")
