"""Proximal policy optimisation (Schulman et al. 2017), as its reference implementations do it.

Maximises `min(r A, clip(r, 1 - eps, 1 + eps) A)` with `r = pi(a|s) / pi_old(a|s)` over several epochs of
minibatches of one batch of sequences. Advantages by GAE, normalised within each minibatch. The old policy's
log-probabilities are those recorded while acting. The value loss is not clipped unless asked for; its clip
keeps the new value within `clip_range_vf` of the old *value*, not of the return. Needs data of the current
policy: `max_lag=0`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from corral.acting.model_policy import ActorCriticPolicy
from corral.algos.base import Algorithm, ModelPolicy, require
from corral.algos.explicit import explicit_loss
from corral.algos.schedule import read_clip_coef
from corral.algos.trajectories import (
    Minibatch,
    compute_values,
    count,
    evaluate,
    flatten_steps,
    mean,
    normalized,
    shuffled,
)
from corral.core.types import Array, DataSpec, EnvSpec, LossOutput, Trajectory
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import Optimizer, adam
from corral.ops.returns import gae
from corral.ops.surrogate import clipped_surrogate


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
        require("learning_rate", self.learning_rate, above=0, most=100)
        require("gamma", self.gamma, least=0, most=1)
        require("gae_lambda", self.gae_lambda, least=0, most=1)
        for name in ("num_steps", "update_epochs", "num_minibatches"):
            require(name, getattr(self, name), least=1)
        read_clip_coef(self.clip_coef)
        for name in ("clip_range_vf", "target_kl"):
            if getattr(self, name) is not None:
                require(name, getattr(self, name), above=0)
        require("max_grad_norm", self.max_grad_norm, above=0)


class Ppo(Algorithm):
    """PPO for one kind of environment."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self.max_grad_norm, self.clip_coef = config.max_grad_norm, read_clip_coef(config.clip_coef)
        self.data = DataSpec("sequence", config.num_steps, num_envs, "once", ("action", "logp"), max_lag=0)

    def build_model(self) -> ActorCritic:
        """Policy and value."""
        return ActorCritic(self.spec, self.config.net)

    def make_policy(self, model: nn.Module, *, explore: bool, rng: np.random.Generator, index: int = 0) -> ModelPolicy:
        """Sample, or take the most likely action."""
        assert isinstance(model, ActorCritic)
        return ActorCriticPolicy(model, explore, rng)

    def optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        """Adam with the epsilon that PPO's results were made with."""
        return adam(params, self.config.learning_rate, eps=1e-5)

    def learning_rate(self, progress: float) -> float:
        """Constant, or falling to 0."""
        return self.config.learning_rate * (1 - progress if self.config.anneal_lr else 1.0)

    def prepare(self, model: nn.Module, batch: Trajectory) -> Minibatch:
        """Advantages and the values' targets."""
        assert isinstance(model, ActorCritic)
        value, after = compute_values(model, batch)
        advantage = gae(
            batch.reward, value, after, batch.terminated, batch.truncated, batch.faulty,
            self.config.gamma, self.config.gae_lambda,
        )  # fmt: skip
        return flatten_steps(model, batch, value, advantage, advantage + value)

    def minibatches(self, batch: Minibatch, rng: torch.Generator) -> Iterator[Minibatch]:
        """Every row once per epoch, in a new order each time."""
        for _ in range(self.config.update_epochs):
            yield from shuffled(batch, self.config.num_minibatches, rng)

    def loss(self, model: nn.Module, target: nn.Module | None, batch: Minibatch, progress: float) -> LossOutput:
        """Clipped surrogate, value error and entropy."""
        assert isinstance(model, ActorCritic)
        config = self.config
        clip = self.clip_coef(progress)
        if model.lean is not None and config.clip_range_vf is None:
            output = explicit_loss(
                model, batch, lambda logp, advantage: _clipped(logp, batch.logp.numpy(), advantage, clip),
                normalize=config.normalize_advantage, value_coef=config.vf_coef, entropy_coef=config.ent_coef,
            )  # fmt: skip
            output.stop = self.too_far(output.metrics["loss/kl"])
            return output
        advantage = normalized(batch.advantage, batch) if config.normalize_advantage else batch.advantage
        logp, entropy, value = evaluate(model, batch)
        log_ratio = logp - batch.logp
        ratio = log_ratio.exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        error = (value - batch.target).square()
        if config.clip_range_vf is not None:
            near = batch.value + (value - batch.value).clamp(-config.clip_range_vf, config.clip_range_vf)
            error = torch.maximum(error, (near - batch.target).square())
        policy_loss, value_loss, spread = -mean(surrogate, batch), 0.5 * mean(error, batch), mean(entropy, batch)
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * spread
        with torch.no_grad():
            kl = mean(ratio - 1 - log_ratio, batch)
            beyond = mean(((ratio - 1).abs() > clip).float(), batch)
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "loss/entropy": spread,
            "loss/kl": kl,
            "loss/clip_fraction": beyond,
        }
        return LossOutput(loss, metrics, stop=self.too_far(kl), rows=count(batch))

    def too_far(self, kl: float | Tensor) -> bool:
        """Whether the policy has moved so far that the epochs end."""
        return self.config.target_kl is not None and float(kl) > 1.5 * self.config.target_kl


def _clipped(logp: Array, old_logp: Array, advantage: Array, clip: float) -> tuple[float, Array, dict[str, float]]:
    result = clipped_surrogate(logp, old_logp, advantage, clip)
    return result.loss, result.grad, {"loss/kl": result.kl, "loss/clip_fraction": result.beyond}
