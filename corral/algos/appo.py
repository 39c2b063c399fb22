"""Asynchronous PPO: the clipped surrogate of PPO on V-trace advantages, for data of a policy some updates older.

Maximises `min(r A, clip(r, 1 - eps, 1 + eps) A)` with `r = pi(a|s) / mu(a|s)`, `mu` the policy that acted. `A` is
V-trace's `r_s + gamma v_{s+1} - V(x_s)`, with the current network's probabilities and values; its own ratio is left
out, because the surrogate has it. `v_s` is the target of the value. Every minibatch is whole sequences, and corrected
anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import nn

from corral.acting.model_policy import ActorCriticPolicy, to_tensors
from corral.acting.policy import Policy
from corral.algos.base import Algorithm, ParamGroup, UpdateContext, require
from corral.algos.schedule import linear_decay
from corral.algos.trajectories import VtraceTargets, explained_variance, forward_sequences, normalize, recorded
from corral.core.types import DataSpec, EnvSpec, LossOutput, Trajectory, slice_envs
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import adam


@dataclass(frozen=True)
class Config:
    """Settings of APPO."""

    lr: float = 3e-4
    """Learning rate of Adam."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to 0."""
    gamma: float = 0.99
    """Discount."""
    length: int = 32
    """Steps in a sequence."""
    batch_size: int = 32
    """Sequences in a batch."""
    epochs: int = 1
    """Passes over each batch."""
    minibatches: int = 1
    """Updates per pass, each on whole sequences."""
    clip: float = 0.2
    """Range of the probability ratio."""
    entropy: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 4.0
    """Gradients are scaled down to this norm."""
    normalize_advantage: bool = True
    """Within each minibatch."""
    rho_bar: float = 1.0
    """Most that the probability ratio weighs a row in the value's targets."""
    c_bar: float = 1.0
    """Most that the probability ratio carries a row's error back."""
    max_lag: int = 40
    """Batches that may lie between the policy that acted and the one that learns; topologies drop what is older."""
    net: NetConfig = field(default_factory=NetConfig)
    """The network."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        require("lr", self.lr, above=0, most=100)
        require("gamma", self.gamma, least=0, most=1)
        for name in ("length", "batch_size", "epochs", "minibatches", "max_lag"):
            require(name, getattr(self, name), least=1)
        for name in ("clip", "max_grad_norm", "rho_bar", "c_bar"):
            require(name, getattr(self, name), above=0)


class Appo(Algorithm):
    """APPO for one kind of environment."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self.data = DataSpec(
            "sequence", config.length, config.batch_size, "once", recorded(config.net),
            max_lag=config.max_lag * config.epochs * config.minibatches,  # every minibatch is a version
        )  # fmt: skip
        self.vtrace = VtraceTargets(config.gamma, config.rho_bar, config.c_bar, None)

    def build_model(self) -> ActorCritic:
        """Policy and value."""
        return ActorCritic(self.spec, self.config.net)

    def make_policy(self, model: nn.Module, *, explore: bool, rng: np.random.Generator, index: int = 0) -> Policy:
        """Sample, or take the most likely action."""
        assert isinstance(model, ActorCritic)
        return ActorCriticPolicy(model, explore, rng)

    def groups(self) -> Sequence[ParamGroup]:
        """Adam with PPO's epsilon."""
        config = self.config
        optimizer = partial(adam, lr=config.lr, eps=1e-5)
        return [ParamGroup(optimizer, linear_decay(config.lr, on=config.anneal_lr), config.max_grad_norm)]

    def minibatches(self, batch: Trajectory, rng: torch.Generator) -> Iterator[Trajectory]:
        """Every sequence once per epoch, in a new order each time; those of nothing but faults are left out."""
        columns = np.flatnonzero(~batch.faulty.all(0))
        if len(columns) == 0:
            return
        for _ in range(self.config.epochs):
            if self.config.minibatches == 1:
                yield batch
                continue
            order = columns[torch.randperm(len(columns), generator=rng).numpy()]
            for part in np.array_split(order, self.config.minibatches):
                if len(part):
                    yield slice_envs(batch, part)

    def losses(
        self, model: nn.Module, target: nn.Module | None, batch: Trajectory, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        """Clipped surrogate, value error and entropy bonus; V-trace uses the same forward pass."""
        assert isinstance(model, ActorCritic)
        config, clip, out = self.config, self.config.clip, forward_sequences(model, batch)
        log_prob, values, device = out.log_prob.detach(), out.values.detach(), out.values.device
        targets = self.vtrace(batch, log_prob.cpu().numpy(), values.cpu().numpy(), out.next_values)
        valid, behaviour, *targets = to_tensors((batch.valid, batch.extras["logp"], *targets), device)
        returns, advantages = (part[valid] for part in targets)
        if config.normalize_advantage:
            advantages = normalize(advantages)

        log_ratio = (out.log_prob - behaviour)[valid]
        ratio = log_ratio.exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        policy_loss, entropy_mean = -surrogate.mean(), out.entropy[valid].mean()
        value_loss = 0.5 * (out.values[valid] - returns).square().mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy * entropy_mean
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "loss/entropy": entropy_mean,
            "loss/kl": (ratio - 1 - log_ratio).mean(),
            "loss/clip_fraction": ((ratio - 1).abs() > clip).float().mean(),
            "loss/explained_variance": explained_variance(values[valid].cpu().numpy(), returns.cpu().numpy()),
        }
        yield LossOutput(loss, metrics, rows=int(batch.valid.sum()))
