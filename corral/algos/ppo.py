"""Proximal policy optimisation (Schulman et al. 2017), as in its reference implementations.

Maximises `min(r A, clip(r, 1 - eps, 1 + eps) A)` with `r = pi(a|s) / pi_old(a|s)` over several epochs of minibatches of
one batch of sequences. Advantages by GAE, normalised within each minibatch. The old policy's log-probabilities are
those recorded while acting. The value loss is not clipped by default; its clip keeps the new value within
`clip_range_vf` of the old *value*, not of the return. On-policy: `max_lag=0`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from corral.algos.base import ParamGroup, UpdateContext, require
from corral.algos.schedule import one_group, read_clip_coef
from corral.algos.trajectories import (
    ActorCriticAlgorithm,
    Minibatch,
    evaluate_actions,
    gae_steps,
    masked_mean,
    normalize,
    num_valid,
    recorded_extras,
    shuffled_minibatches,
)
from corral.core.types import DataSpec, EnvSpec, LossOutput, Trajectory
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import adam


@dataclass(frozen=True)
class Config:
    """Settings of PPO."""

    learning_rate: float = 2.5e-4
    """Learning rate of Adam."""
    anneal_lr: bool = True
    """Decay the learning rate linearly to 0."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Lambda of GAE."""
    num_steps: int = 128
    """Steps of each environment between updates."""
    update_epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 4
    """Minibatches per pass. With a recurrent core each consists of whole sequences."""
    clip_coef: float | str = 0.2
    """Clip range of the probability ratio; may be a schedule, such as 0.2:0."""
    clip_range_vf: float | None = None
    """Clip range of a new value around the old one, in the scale of the rewards; none: no clipping."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of 0.5 * (V - R)^2, as in CleanRL. To match SB3's `vf_coef=c`, set `vf_coef=2c`."""
    max_grad_norm: float = 0.5
    """Maximum gradient norm."""
    target_kl: float | None = None
    """Stop the epochs of a batch when the KL divergence from the old policy exceeds 1.5 times this."""
    normalize_advantage: bool = True
    """Normalize advantages within each minibatch."""
    net: NetConfig = field(default_factory=NetConfig)
    """The network."""

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, above=0, maximum=100)
        require("gamma", self.gamma, minimum=0, maximum=1)
        require("gae_lambda", self.gae_lambda, minimum=0, maximum=1)
        for name in ("num_steps", "update_epochs", "num_minibatches"):
            require(name, getattr(self, name), minimum=1)
        read_clip_coef(self.clip_coef)
        for name in ("clip_range_vf", "target_kl"):
            if getattr(self, name) is not None:
                require(name, getattr(self, name), above=0)
        require("max_grad_norm", self.max_grad_norm, above=0)


class Ppo(ActorCriticAlgorithm[Config]):
    """PPO for one environment specification."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self.clip_coef = read_clip_coef(config.clip_coef)
        self.data = DataSpec("sequence", config.num_steps, num_envs, "once", recorded_extras(config.net), max_lag=0)

    def groups(self) -> Sequence[ParamGroup]:
        return one_group(self.config, adam, eps=1e-5)

    def prepare(self, model: ActorCritic, batch: Trajectory) -> Minibatch:
        return gae_steps(model, batch, self.config.gamma, self.config.gae_lambda)

    def minibatches(self, batch: Minibatch, rng: torch.Generator) -> Iterator[Minibatch]:
        for _ in range(self.config.update_epochs):
            yield from shuffled_minibatches(batch, self.config.num_minibatches, rng)

    def losses(
        self, model: ActorCritic, target: nn.Module | None, batch: Minibatch, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        """Clipped surrogate, value error and entropy bonus; arXiv:1707.06347, eq. 9."""
        config, mask = self.config, batch.mask
        clip = self.clip_coef(ctx.progress)
        advantages = normalize(batch.advantages, mask) if config.normalize_advantage else batch.advantages
        log_prob, entropy, values = evaluate_actions(model, batch)

        log_ratio = log_prob - batch.old_log_prob
        ratio = log_ratio.exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        policy_loss = -masked_mean(surrogate, mask)
        value_loss = 0.5 * masked_mean(self._value_error(values, batch), mask)
        entropy_mean = masked_mean(entropy, mask)
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy_mean

        with torch.no_grad():
            approx_kl = masked_mean(ratio - 1 - log_ratio, mask)
            clip_fraction = masked_mean(((ratio - 1).abs() > clip).float(), mask)
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "loss/entropy": entropy_mean,
            "loss/kl": approx_kl,
            "loss/clip_fraction": clip_fraction,
        }
        yield LossOutput(loss, metrics, stop=self.is_past_target_kl(approx_kl), rows=num_valid(batch))

    def _value_error(self, values: Tensor, batch: Minibatch) -> Tensor:
        """Squared error, or the maximum of it and the squared error of the clipped value."""
        error, limit = (values - batch.returns).square(), self.config.clip_range_vf
        if limit is None:
            return error
        clipped = batch.old_values + (values - batch.old_values).clamp(-limit, limit)
        return torch.maximum(error, (clipped - batch.returns).square())

    def is_past_target_kl(self, approx_kl: float | Tensor) -> bool | Tensor:
        return self.config.target_kl is not None and approx_kl > 1.5 * self.config.target_kl
