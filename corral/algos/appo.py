"""Asynchronous PPO: the clipped surrogate of PPO with V-trace advantages, for data of a slightly older policy.

Maximises `min(r A, clip(r, 1 - eps, 1 + eps) A)` with `r = pi(a|s) / mu(a|s)`, where `mu` is the policy that acted. `A`
is V-trace's `r_s + gamma v_{s+1} - V(x_s)` with the current network's probabilities and values; its own ratio is
omitted, because the surrogate contains it. `v_s` is the value target. A minibatch consists of whole sequences, and
V-trace is computed again for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from corral.acting.model_policy import to_tensors
from corral.algos.base import ParamGroup, UpdateContext, require
from corral.algos.schedule import one_group, read_clip_coef
from corral.algos.trajectories import (
    ActorCriticAlgorithm,
    VtraceTargets,
    explained_variance,
    forward_sequences,
    normalize,
    recorded_extras,
)
from corral.core.types import DataSpec, EnvSpec, LossOutput, Trajectory, slice_envs
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import adam


@dataclass(frozen=True)
class Config:
    """Settings of APPO."""

    learning_rate: float = 3e-4
    """Learning rate of Adam."""
    anneal_lr: bool = True
    """Decay the learning rate linearly to 0."""
    gamma: float = 0.99
    """Discount."""
    num_steps: int = 32
    """Steps in a sequence."""
    batch_size: int = 32
    """Sequences in a batch."""
    update_epochs: int = 1
    """Passes over each batch."""
    num_minibatches: int = 1
    """Minibatches per pass, each of whole sequences."""
    clip_coef: float | str = 0.2
    """Clip range of the probability ratio; may be a schedule, such as 0.2:0."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of 0.5 * (V - R)^2."""
    max_grad_norm: float = 4.0
    """Maximum gradient norm."""
    normalize_advantage: bool = True
    """Normalize advantages within each minibatch."""
    vtrace_rho: float = 1.0
    """Clip of the importance ratio of each step in the value targets."""
    vtrace_c: float = 1.0
    """Clip of the importance ratio that propagates errors to earlier steps."""
    max_policy_lag: int = 40
    """Maximum policy lag in batches; asynchronous topologies drop older data."""
    net: NetConfig = field(default_factory=NetConfig)
    """The network."""

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, above=0, maximum=100)
        require("gamma", self.gamma, minimum=0, maximum=1)
        for name in ("num_steps", "batch_size", "update_epochs", "num_minibatches", "max_policy_lag"):
            require(name, getattr(self, name), minimum=1)
        read_clip_coef(self.clip_coef)
        for name in ("max_grad_norm", "vtrace_rho", "vtrace_c"):
            require(name, getattr(self, name), above=0)


class Appo(ActorCriticAlgorithm[Config]):
    """APPO for one environment specification."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self.clip_coef = read_clip_coef(config.clip_coef)
        self.data = DataSpec(
            "sequence", config.num_steps, config.batch_size, "once", recorded_extras(config.net),
            # Every minibatch is one version.
            max_lag=config.max_policy_lag * config.update_epochs * config.num_minibatches,
        )  # fmt: skip
        self.vtrace = VtraceTargets(config.gamma, config.vtrace_rho, config.vtrace_c, None)

    def groups(self) -> Sequence[ParamGroup]:
        return one_group(self.config, adam, eps=1e-5)

    def minibatches(self, batch: Trajectory, rng: torch.Generator) -> Iterator[Trajectory]:
        """Every sequence once per epoch, in a new order each time; sequences with only faulty rows are left out."""
        columns = np.flatnonzero(~batch.faulty.all(0))
        if len(columns) == 0:
            return
        for _ in range(self.config.update_epochs):
            if self.config.num_minibatches == 1:
                yield batch
                continue
            order = columns[torch.randperm(len(columns), generator=rng).numpy()]
            for part in np.array_split(order, self.config.num_minibatches):
                if len(part):
                    yield slice_envs(batch, part)

    def losses(
        self, model: ActorCritic, target: nn.Module | None, batch: Trajectory, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        """Clipped surrogate, value error and entropy bonus; V-trace uses the same forward pass."""
        config, clip, out = self.config, self.clip_coef(ctx.progress), forward_sequences(model, batch)
        returns, advantages = map(out.valid, self.vtrace.of_outputs(batch, out))
        if config.normalize_advantage:
            advantages = normalize(advantages)

        log_ratio = out.valid(out.log_prob - to_tensors(batch.extras["logp"], returns.device))
        ratio = log_ratio.exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        policy_loss, entropy_mean = -surrogate.mean(), out.valid(out.entropy).mean()
        value_loss = 0.5 * (out.valid(out.values) - returns).square().mean()
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy_mean
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "loss/entropy": entropy_mean,
            "loss/kl": (ratio - 1 - log_ratio).mean(),
            "loss/clip_fraction": ((ratio - 1).abs() > clip).float().mean(),
            "loss/explained_variance": explained_variance(out.valid(out.values.detach()), returns),
        }
        yield LossOutput(loss, metrics, rows=len(out.rows))
