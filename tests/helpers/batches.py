"""Batches for the algorithms: made-up experience, acted on by the algorithm's own policy."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.algos.base import UpdateContext
from corral.core.types import EnvSpec, tree_map
from corral.learn.fast import find_fast_loss
from corral.nets.q_network import QNetwork
from helpers.fragments import Stream, fragment

torch.set_num_threads(1)  # for small networks more only wait for each other

BOX = spaces.Box(-1e9, 1e9, (3,), np.float32)
SPECS = {
    "discrete": EnvSpec(BOX, spaces.Discrete(4)),
    "multi_discrete": EnvSpec(BOX, spaces.MultiDiscrete([2, 3])),
    "box": EnvSpec(BOX, spaces.Box(-2, 2, (2,), np.float32)),
    "hybrid": EnvSpec(BOX, spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(0, 5, (1,), np.float32)})),
}


def randomize(model, seed=0, scale=0.5):
    """Weights, biases included, of a size at which everything matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * scale)
    return model


def experience(spec, length=12, width=4, seed=0, end=0.15, fault=0.0):
    """A fragment of `width` environments whose episodes end in every way."""
    spec.action_space.seed(seed)
    streams = [Stream(spec, [seed, b], end, fault) for b in range(width)]
    return fragment(streams, list(range(width)), length)[0]


def act_on(traj, policy, spec):
    """Record what the policy would have done, step by step, as sampling does."""
    length, width = traj.shape
    state = policy.initial_state(width)
    state = None if state is None else state.numpy()
    recorded, actions = [], []
    for t in range(length):
        obs = tree_map(lambda leaf, t=t: leaf[t].copy(), traj.obs)
        action, after, extras = policy.act(obs, None if state is None else state.copy(), traj.first[t])
        recorded.append({name: np.array(value) for name, value in extras.items()})
        actions.append(spec.action.flatten(action))
        state = after
    traj.extras = {name: np.stack([row[name] for row in recorded]) for name in recorded[0]}
    traj.action = spec.action.unflatten([np.stack(leaves) for leaves in zip(*actions, strict=True)])
    return traj


def batch_for(algo, model, seed=0, **kwargs):
    """Experience of the algorithm's own policy."""
    policy = algo.make_policy(model, explore=True, rng=np.random.default_rng(seed))
    return act_on(experience(algo.spec, seed=seed, **kwargs), policy, algo.spec)


def gradients(loss, model):
    """Gradients of a loss by autograd, one tensor for each weight, zeros where there is none."""
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, model.parameters(), strict=True)]


def on_path(net, path):
    """Let a network learn by torch, or in NumPy, from now on; its gradients are zero."""
    net.numpy_towers = () if isinstance(net, QNetwork) else None
    net._learns_in_numpy = False
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    if path == "numpy" and not net.use_numpy():
        pytest.skip("only by torch")
    return net


def observe(encoder, obs):
    """Add a batch of observations to the statistics of an encoder that normalises."""
    if encoder.norm is not None:
        encoder.norm.merge(encoder.moments(obs))


def loss_of(algo, model, target, batch, progress=0.0):
    """The algorithm's only loss of a batch."""
    (output,) = algo.losses(model, target, batch, UpdateContext(progress, torch.Generator().manual_seed(0)))
    return output


def learned(algo, model, batch, path="torch", progress=0.0, target=None):
    """What the learner gets of a batch: the loss, and the gradient of every weight, by torch or in NumPy."""
    for net in (model, target):
        if net is not None:
            on_path(net, path)
    fast = find_fast_loss(algo, model, target)
    if fast is not None and fast.takes(batch):
        output = fast.compute(algo, model, target, batch, UpdateContext(progress, torch.Generator()))
    else:
        if path == "numpy":
            model.learn_in_numpy()
        output = loss_of(algo, model, target, batch, progress)
    (output.backward or output.loss.backward)()
    model._learns_in_numpy = False
    return output, [param.grad.clone() for param in model.parameters()]
