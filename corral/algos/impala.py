"""Importance-weighted actor-learner (Espeholt et al. 2018, IMPALA): one V-trace update per batch of sequences.

The policy that acted may be some updates older than the learner's. V-trace corrects for it with the current network's
probabilities and values: `v_s` is the value target, and the policy follows `rho_s grad log pi(a_s|x_s) (r_s + gamma
v_{s+1} - V(x_s))`. Losses are sums over the rows of a batch, not means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from corral.acting.model_policy import to_tensors
from corral.algos.base import ParamGroup, UpdateContext, require
from corral.algos.schedule import one_group
from corral.algos.trajectories import (
    ActorCriticAlgorithm,
    VtraceTargets,
    explained_variance,
    forward_sequences,
    recorded_extras,
)
from corral.core.types import DataSpec, EnvSpec, LossOutput, Trajectory
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import adam, rmsprop


@dataclass(frozen=True)
class Config:
    """Settings of IMPALA."""

    learning_rate: float = 6e-4
    """Learning rate."""
    anneal_lr: bool = True
    """Decay the learning rate linearly to 0."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """RMSProp as in the paper, or Adam."""
    gamma: float = 0.99
    """Discount."""
    num_steps: int = 20
    """Steps in a sequence."""
    batch_size: int = 32
    """Sequences in an update."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of 0.5 * (V - R)^2."""
    max_grad_norm: float = 40.0
    """Maximum gradient norm."""
    vtrace: bool = True
    """Correct for data of an older policy by V-trace; false treats all data as on-policy."""
    vtrace_rho: float = 1.0
    """Clip of the importance ratio of each step; determines the policy whose values the targets converge to."""
    vtrace_c: float = 1.0
    """Clip of the importance ratio that propagates errors to earlier steps; sets how fast they converge."""
    replay_fraction: float = 0.0
    """Fraction of each batch that is sampled from earlier sequences."""
    buffer_size: int = 1_000
    """Earlier sequences that are kept, with replay_fraction."""
    max_policy_lag: int = 40
    """Batches that may lie between the policy that acted and the one that learns; topologies drop older data."""
    net: NetConfig = field(default_factory=NetConfig)
    """The network."""

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, above=0, maximum=100)
        require("gamma", self.gamma, minimum=0, maximum=1)
        for name in ("num_steps", "batch_size", "buffer_size", "max_policy_lag"):
            require(name, getattr(self, name), minimum=1)
        for name in ("max_grad_norm", "vtrace_rho", "vtrace_c"):
            require(name, getattr(self, name), above=0)
        require("replay_fraction", self.replay_fraction, minimum=0, maximum=0.95)


class Impala(ActorCriticAlgorithm[Config]):
    """IMPALA for one environment specification."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self.data = DataSpec(
            "sequence", config.num_steps, config.batch_size, "once", recorded_extras(config.net), config.max_policy_lag,
            capacity=config.buffer_size, replayed=config.replay_fraction,
        )  # fmt: skip
        self.vtrace = VtraceTargets(
            config.gamma, config.vtrace_rho, config.vtrace_c, config.vtrace_rho, on=config.vtrace
        )

    def groups(self) -> Sequence[ParamGroup]:
        if self.config.optimizer == "adam":
            return one_group(self.config, adam, eps=1e-5)
        return one_group(self.config, rmsprop, decay=0.99, eps=0.01)

    def minibatches(self, batch: Trajectory, rng: torch.Generator) -> Iterator[Trajectory]:
        if not batch.faulty.all():
            yield batch

    def losses(
        self, model: ActorCritic, target: nn.Module | None, batch: Trajectory, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        """Policy gradient, value error and entropy bonus, summed; V-trace uses the same forward pass."""
        config, out = self.config, forward_sequences(model, batch)
        returns, advantages = self.vtrace.of_outputs(batch, out)
        policy_loss = -out.valid(out.log_prob * advantages).mean()
        value_loss = 0.5 * out.valid(out.values - returns).square().mean()
        entropy_mean = out.valid(out.entropy).mean()
        loss = (policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy_mean) * len(out.rows)
        log_ratio = out.valid(out.log_prob.detach() - to_tensors(batch.extras["logp"], returns.device))
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "loss/entropy": entropy_mean,
            "loss/kl": (log_ratio.exp() - 1 - log_ratio).mean(),
            "loss/explained_variance": explained_variance(out.valid(out.values.detach()), out.valid(returns)),
        }
        yield LossOutput(loss, metrics, rows=0)
