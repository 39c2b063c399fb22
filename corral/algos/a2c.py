"""Advantage actor-critic (Mnih et al. 2016, synchronous): one update per batch of short sequences.

Follows `grad log pi(a|s) A` with `A` from GAE: `gae_lambda=1` is the n-step advantage of the paper, `gae_lambda=0` is
TD(0). On-policy: `max_lag=0`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from corral.algos.base import ParamGroup, UpdateContext, require
from corral.algos.schedule import one_group
from corral.algos.trajectories import (
    ActorCriticAlgorithm,
    Minibatch,
    evaluate_actions,
    gae_steps,
    masked_mean,
    normalize,
    num_valid,
    recorded_extras,
)
from corral.core.types import DataSpec, EnvSpec, LossOutput, Trajectory
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import adam, rmsprop


@dataclass(frozen=True)
class Config:
    """Settings of A2C."""

    learning_rate: float = 7e-4
    """Learning rate."""
    anneal_lr: bool = False
    """Decay the learning rate linearly to 0."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """RMSProp as in the paper, or Adam."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 1.0
    """Lambda of GAE: 1 for n-step advantages, 0 for TD(0)."""
    num_steps: int = 5
    """Steps of each environment between updates."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of 0.5 * (V - R)^2, as in CleanRL. To match SB3's `vf_coef=c`, set `vf_coef=2c`."""
    max_grad_norm: float = 0.5
    """Maximum gradient norm."""
    normalize_advantage: bool = False
    """Normalize advantages within each batch."""
    net: NetConfig = field(default_factory=NetConfig)
    """The network."""

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, above=0, maximum=100)
        require("gamma", self.gamma, minimum=0, maximum=1)
        require("gae_lambda", self.gae_lambda, minimum=0, maximum=1)
        require("num_steps", self.num_steps, minimum=1)
        require("max_grad_norm", self.max_grad_norm, above=0)


class A2c(ActorCriticAlgorithm[Config]):
    """A2C for one environment specification."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self.data = DataSpec("sequence", config.num_steps, num_envs, "once", recorded_extras(config.net), max_lag=0)

    def groups(self) -> Sequence[ParamGroup]:
        if self.config.optimizer == "adam":
            return one_group(self.config, adam, eps=1e-5)
        return one_group(self.config, rmsprop, decay=0.99, eps=1e-5)

    def prepare(self, model: ActorCritic, batch: Trajectory) -> Minibatch:
        return gae_steps(model, batch, self.config.gamma, self.config.gae_lambda)

    def minibatches(self, batch: Minibatch, rng: torch.Generator) -> Iterator[Minibatch]:
        if len(batch):
            yield batch

    def losses(
        self, model: ActorCritic, target: nn.Module | None, batch: Minibatch, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        config, mask = self.config, batch.mask
        advantages = normalize(batch.advantages, mask) if config.normalize_advantage else batch.advantages
        log_prob, entropy, values = evaluate_actions(model, batch)
        policy_loss = -masked_mean(log_prob * advantages, mask)
        value_loss = 0.5 * masked_mean((values - batch.returns).square(), mask)
        entropy_mean = masked_mean(entropy, mask)
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy_mean
        metrics = {"loss/policy": policy_loss, "loss/value": value_loss, "loss/entropy": entropy_mean}
        yield LossOutput(loss, metrics, rows=num_valid(batch))
