"""NumPy towers stand in for plain layers only: whatever else a network computes, it acts and learns with by torch."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.batches import SPECS, batch_for, randomize
from torch import nn

from corral.acting.model_policy import ActorCriticPolicy, EpsilonGreedyPolicy
from corral.algos import ppo
from corral.core.types import EnvSpec, Sample
from corral.learn.device import Precision
from corral.learn.learner import Learner
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.nets.encoder import Encoder
from corral.nets.network import use_precision
from corral.nets.q_network import QNetwork

NET = NetConfig(hidden_sizes=(8, 8))
SPEC = SPECS["box"]
OBS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


class Negated(ActorCritic):
    """A policy of its own, with the inherited layers."""

    def forward(self, obs):
        params, values = super().forward(obs)
        return -params, values

    def act(self, obs, state, first):
        params, state = super().act(obs, state, first)
        return -params, state


class NegatedQ(QNetwork):
    def forward(self, obs):
        return -super().forward(obs)


class OwnEncoder(Encoder):
    def forward(self, obs):
        return 2 * super().forward(obs)


class OwnTorso(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def ppo_learner(model, kind=ppo.Ppo):
    algo = kind(ppo.Config(net=NET), SPEC, 4)
    return Learner(algo, model, torch.Generator().manual_seed(0), Precision("fp32", ""))


def test_subclass_acts_with_its_own_policy():
    model = randomize(Negated(SPEC, NET))
    use_precision(model, "fp32")
    action = ActorCriticPolicy(model, explore=False, rng=np.random.default_rng(0)).act(OBS, None, np.zeros(5, bool))[2]
    with torch.no_grad():
        np.testing.assert_array_equal(action["action"], model(torch.from_numpy(OBS))[0][:, :2].numpy())


def test_subclass_acts_with_its_own_q_values():
    spec = EnvSpec(SPEC.observation_space, spaces.Discrete(4))
    model = randomize(NegatedQ(spec, 4, NET, dueling=False))
    use_precision(model, "fp32")
    policy = EpsilonGreedyPolicy(model, lambda chosen: chosen, 4, lambda progress: 0.0, np.random.default_rng(0))
    with torch.no_grad():
        np.testing.assert_array_equal(
            policy.act(OBS, None, np.zeros(5, bool))[0], model(torch.from_numpy(OBS)).argmax(-1).numpy()
        )


def spectral_norm(model):
    nn.utils.spectral_norm(model.policy_torso[0])


def parametrized(model):
    nn.utils.parametrizations.spectral_norm(model.policy_torso[0])


def pre_hook(model):
    model.policy_torso[1].register_forward_pre_hook(lambda module, args: (2 * args[0],))


def hook_of_network(model):
    model.register_forward_hook(lambda module, args, out: (2 * out[0], out[1]))


def hook_of_gradient(model):
    model.value_head.weight.register_hook(lambda grad: 0 * grad)


def own_method(model):
    layer = model.policy_head
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight, layer.bias)


def own_torso(model):
    model.policy_torso = OwnTorso(*model.policy_torso)


def own_encoder(model):
    model.encoder = OwnEncoder(SPEC.observation, NET)


def frozen_head(model):
    model.policy_head.requires_grad_(False)


def frozen_first_layer(model):
    model.value_torso[0].requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [
        spectral_norm,
        parametrized,
        pre_hook,
        hook_of_network,
        hook_of_gradient,
        own_method,
        own_torso,
        own_encoder,
        frozen_head,
        frozen_first_layer,
    ],
)
def test_changed_layers_stay_with_torch(change):
    model = randomize(ActorCritic(SPEC, NET))
    change(model)
    learner = ppo_learner(model)
    assert model.numpy_towers is None
    before = learner.flat.weights.detach().clone()
    assert learner.step(Sample(batch_for(learner.algo, model)), 0.0)
    assert not torch.equal(learner.flat.weights, before)


def test_frozen_head_lets_the_torso_learn():
    class Mine(ppo.Ppo):
        """Has no fast loss: its own one runs in NumPy where it can."""

    model = randomize(ActorCritic(SPEC, NET))
    frozen_head(model)
    learner = ppo_learner(model, Mine)
    before, head = model.policy_torso[0].weight.detach().clone(), model.policy_head.weight.detach().clone()
    learner.step(Sample(batch_for(learner.algo, model)), 0.0)
    assert not torch.equal(model.policy_torso[0].weight, before)
    assert torch.equal(model.policy_head.weight, head)


def test_frozen_policy_lets_the_value_learn():
    model = randomize(ActorCritic(SPEC, NET))
    for layers in (model.policy_torso, model.policy_head):
        layers.requires_grad_(False)
    learner = ppo_learner(model)
    assert model.numpy_towers is not None
    before, head = model.value_torso[0].weight.detach().clone(), model.policy_head.weight.detach().clone()
    learner.step(Sample(batch_for(learner.algo, model)), 0.0)
    assert not torch.equal(model.value_torso[0].weight, before)
    assert torch.equal(model.policy_head.weight, head)


@pytest.mark.parametrize("learns", [False, True])
def test_value_has_a_gradient(learns):
    model = randomize(ActorCritic(SPEC, NET))
    learner = ppo_learner(model)
    if learns:
        model.learn_in_numpy()
    assert model.numpy_towers is not None
    obs = torch.from_numpy(OBS)
    model.value(obs).square().sum().backward()
    found = [param.grad.clone() for param in model.value_torso.parameters()]
    learner.flat.grad.zero_()
    model.value_head(model.value_torso(obs)).square().sum().backward()
    for one, param in zip(found, model.value_torso.parameters(), strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(one, param.grad, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        assert not model.value(obs).requires_grad
