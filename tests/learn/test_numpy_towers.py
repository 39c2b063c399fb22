"""Small networks that learn in NumPy under a torch loss: the same updates as torch's own layers make."""

import numpy as np
import pytest
import torch
from helpers.batches import SPECS, batch_for, randomize
from helpers.two_groups import Config as TwoGroupsConfig
from helpers.two_groups import TwoGroups

from corral.algos.reinforce import Config as ReinforceConfig
from corral.algos.reinforce import Reinforce
from corral.algos.search.alphazero import AlphaZero
from corral.algos.search.alphazero import Config as AlphaZeroConfig
from corral.algos.search.ppo_search import Config as PpoSearchConfig
from corral.algos.search.ppo_search import PpoSearch
from corral.core.types import Positions, Sample
from corral.learn.device import Precision
from corral.learn.learner import Learner
from corral.nets.config import NetConfig

UPDATES = 20
NET = NetConfig(hidden_sizes=(16, 16))
SPEC = SPECS["discrete"]


def positions(algo, model, seed):
    rng = np.random.default_rng(seed)
    policy = rng.dirichlet(np.ones(4), 32).astype(np.float32)
    extras = {"better": policy, "legal": np.ones((32, 4), np.bool_), "searched": rng.random(32) < 0.8}
    return Sample(Positions(rng.normal(size=(32, 3)).astype(np.float32), rng.choice([-1.0, 1.0], 32), extras))


def episodes(algo, model, seed):
    return Sample(batch_for(algo, model, seed))


def searched(algo, model, seed):
    """Experience with made-up searches, whose batches only the algorithm's own loss takes."""
    traj = batch_for(algo.ppo, model, seed)
    rng, shape = np.random.default_rng(seed), traj.shape
    traj.extras |= {
        "behaviour": traj.extras["logp"] + rng.normal(0, 0.1, shape).astype(np.float32),
        "better": rng.dirichlet(np.ones(4), shape).astype(np.float32),
        "distill": (rng.random(shape) < 0.5).astype(np.float32),
        "kappa": np.zeros(shape, np.float32),
        "search_value": np.zeros(shape, np.float32),
    }
    return Sample(traj)


CASES = {
    "reinforce": (lambda: Reinforce(ReinforceConfig(net=NET), SPEC, 4), episodes),
    "alphazero": (lambda: AlphaZero(AlphaZeroConfig(net=NET), SPEC, 4), positions),
    "ppo-search": (lambda: PpoSearch(PpoSearchConfig(), SPEC, 4), searched),
    "two groups": (lambda: TwoGroups(TwoGroupsConfig(net=NET), SPEC, 4), episodes),
}


@pytest.mark.parametrize("case", CASES)
def test_20_updates_equal_those_of_torch(case):
    make, batch = CASES[case]
    learners = []
    for in_numpy in (True, False):
        algo = make()
        learner = Learner(
            algo, randomize(algo.build_model(), scale=0.3), torch.Generator().manual_seed(0), Precision("fp32", "")
        )
        assert learner.model.numpy_towers is not None
        assert learner.model._learns_in_numpy
        learner.model._learns_in_numpy = in_numpy
        learners.append(learner)
    start = learners[0].flat.weights.detach().clone()
    for k in range(UPDATES):
        sample = batch(learners[0].algo, learners[0].model, k)
        for learner in learners:
            assert learner.step(sample, k / UPDATES)
    ours, theirs = (learner.flat.weights.detach() for learner in learners)
    assert float((theirs - start).norm() / start.norm()) > 1e-3
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_gradient_by_input_equals_autograd():
    """What an actor needs that learns through a critic of its actions."""
    algo = Reinforce(ReinforceConfig(net=NET), SPEC, 4)
    model = randomize(algo.build_model())
    Learner(algo, model, torch.Generator(), Precision("fp32", ""))
    x = torch.randn(7, 3, requires_grad=True)
    found = torch.autograd.grad(model.numpy_towers[1].apply(x).square().sum(), x)[0]
    expected = torch.autograd.grad(model.value_head(model.value_torso(x)).square().sum(), x)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
