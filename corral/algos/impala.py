"""Importance-weighted actor-learner (Espeholt et al. 2018, IMPALA): one update per batch of sequences, corrected.

The policy that acted may be some updates older than the one that learns. V-trace corrects for it with the current
network's probabilities and values: `v_s` is the target of the value, and the policy follows
`rho_s grad log pi(a_s|x_s) (r_s + gamma v_{s+1} - V(x_s))`. Losses are sums over the rows of a batch, not means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from corral.acting.model_policy import ActorCriticPolicy, to_tensors
from corral.acting.policy import Policy
from corral.algos.base import Algorithm, ParamGroup, UpdateContext, require
from corral.algos.schedule import linear_decay
from corral.algos.trajectories import VtraceTargets, explained_variance, forward_sequences, recorded
from corral.core.types import DataSpec, EnvSpec, LossOutput, Trajectory
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import Optimizer, adam, rmsprop


@dataclass(frozen=True)
class Config:
    """Settings of IMPALA."""

    lr: float = 6e-4
    """Learning rate."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to 0."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """RMSProp as in the paper, or Adam."""
    gamma: float = 0.99
    """Discount."""
    length: int = 20
    """Steps in a sequence."""
    batch_size: int = 32
    """Sequences in an update."""
    entropy: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 40.0
    """Gradients are scaled down to this norm."""
    correction: Literal["vtrace", "none"] = "vtrace"
    """What is done about data of an older policy; none: it is taken for the current one's."""
    rho_bar: float = 1.0
    """Most that the probability ratio weighs a row; decides to which policy's value the targets lead."""
    c_bar: float = 1.0
    """Most that the probability ratio carries a row's error back; decides how fast they lead there."""
    replayed: float = 0.0
    """Share of each batch that is drawn from earlier sequences."""
    replay_capacity: int = 1_000
    """Earlier sequences that are kept, where some are drawn again."""
    max_lag: int = 40
    """Batches that may lie between the policy that acted and the one that learns; topologies drop what is older."""
    net: NetConfig = field(default_factory=NetConfig)
    """The network."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        require("lr", self.lr, above=0, most=100)
        require("gamma", self.gamma, least=0, most=1)
        for name in ("length", "batch_size", "replay_capacity", "max_lag"):
            require(name, getattr(self, name), least=1)
        for name in ("max_grad_norm", "rho_bar", "c_bar"):
            require(name, getattr(self, name), above=0)
        require("replayed", self.replayed, least=0, most=0.95)


class Impala(Algorithm):
    """IMPALA for one kind of environment."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self.data = DataSpec(
            "sequence", config.length, config.batch_size, "once", recorded(config.net), config.max_lag,
            capacity=config.replay_capacity, replayed=config.replayed,
        )  # fmt: skip
        self.vtrace = VtraceTargets(
            config.gamma, config.rho_bar, config.c_bar, config.rho_bar, on=config.correction == "vtrace"
        )

    def build_model(self) -> ActorCritic:
        """Policy and value."""
        return ActorCritic(self.spec, self.config.net)

    def make_policy(self, model: nn.Module, *, explore: bool, rng: np.random.Generator, index: int = 0) -> Policy:
        """Sample, or take the most likely action."""
        assert isinstance(model, ActorCritic)
        return ActorCriticPolicy(model, explore, rng)

    def groups(self) -> Sequence[ParamGroup]:
        """RMSProp with the paper's constants, or Adam."""
        config = self.config
        return [ParamGroup(self._optimizer, linear_decay(config.lr, on=config.anneal_lr), config.max_grad_norm)]

    def _optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        if self.config.optimizer == "adam":
            return adam(params, self.config.lr, eps=1e-5)
        return rmsprop(params, self.config.lr, decay=0.99, eps=0.01)

    def minibatches(self, batch: Trajectory, rng: torch.Generator) -> Iterator[Trajectory]:
        """All sequences, unless every row was faulty."""
        if not batch.faulty.all():
            yield batch

    def losses(
        self, model: nn.Module, target: nn.Module | None, batch: Trajectory, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        """Policy gradient, value error and entropy bonus, summed; V-trace uses the same forward pass."""
        assert isinstance(model, ActorCritic)
        config, out = self.config, forward_sequences(model, batch)
        log_prob, values, device = out.log_prob.detach(), out.values.detach(), out.values.device
        targets = self.vtrace(batch, log_prob.cpu().numpy(), values.cpu().numpy(), out.next_values)
        returns, advantages = to_tensors(targets, device)
        valid, behaviour = to_tensors((batch.valid, batch.extras["logp"]), device)
        policy_loss = -(out.log_prob * advantages)[valid].mean()
        value_loss = 0.5 * (out.values - returns)[valid].square().mean()
        entropy_mean = out.entropy[valid].mean()
        loss = (policy_loss + config.value_coef * value_loss - config.entropy * entropy_mean) * valid.sum()
        log_ratio = (log_prob - behaviour)[valid]
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "loss/entropy": entropy_mean,
            "loss/kl": (log_ratio.exp() - 1 - log_ratio).mean(),
            "loss/explained_variance": explained_variance(values[valid].cpu().numpy(), returns[valid].cpu().numpy()),
        }
        yield LossOutput(loss, metrics, rows=0)
