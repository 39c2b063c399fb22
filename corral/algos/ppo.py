"""Proximal policy optimisation (Schulman et al. 2017), as its reference implementations do it.

Maximises `min(r A, clip(r, 1 - eps, 1 + eps) A)` with `r = pi(a|s) / pi_old(a|s)` over several epochs of
minibatches of one batch of sequences. Advantages by GAE, normalised within each minibatch. The old policy's
log-probabilities are those recorded while acting. The value loss is not clipped unless asked for; its clip
keeps the new value within `clip_value` of the old *value*, not of the return. Needs data of the current
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

    lr: float = 2.5e-4
    """Learning rate of Adam."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to 0."""
    gamma: float = 0.99
    """Discount."""
    lam: float = 0.95
    """Lambda of GAE."""
    length: int = 128
    """Steps of each environment between updates."""
    epochs: int = 4
    """Passes over each batch."""
    minibatches: int = 4
    """Updates per pass; with a memory, each takes whole sequences."""
    clip: float = 0.2
    """Range of the probability ratio."""
    anneal_clip: bool = False
    """Let the range fall linearly to 0."""
    clip_value: float | None = None
    """Range of a new value around the old one, in the reward's own scale; none: not clipped."""
    entropy: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss, half the squared error; of SB3's vf_coef, which weighs all of it, twice as much."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    target_kl: float | None = None
    """Stop the epochs when the policy has moved further than this."""
    normalize_advantage: bool = True
    """Within each minibatch."""
    net: NetConfig = field(default_factory=NetConfig)
    """The network."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        require("lr", self.lr, above=0, most=100)
        require("gamma", self.gamma, least=0, most=1)
        require("lam", self.lam, least=0, most=1)
        for name in ("length", "epochs", "minibatches"):
            require(name, getattr(self, name), least=1)
        require("clip", self.clip, above=0)
        for name in ("clip_value", "target_kl"):
            if getattr(self, name) is not None:
                require(name, getattr(self, name), above=0)
        require("max_grad_norm", self.max_grad_norm, above=0)


class Ppo(Algorithm):
    """PPO for one kind of environment."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self.max_grad_norm = config.max_grad_norm
        self.data = DataSpec("sequence", config.length, num_envs, "once", ("action", "logp"), max_lag=0)

    def build_model(self) -> ActorCritic:
        """Policy and value."""
        return ActorCritic(self.spec, self.config.net)

    def make_policy(self, model: nn.Module, *, explore: bool, rng: np.random.Generator, index: int = 0) -> ModelPolicy:
        """Sample, or take the most likely action."""
        assert isinstance(model, ActorCritic)
        return ActorCriticPolicy(model, explore, rng)

    def optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        """Adam with the epsilon that PPO's results were made with."""
        return adam(params, self.config.lr, eps=1e-5)

    def learning_rate(self, progress: float) -> float:
        """Constant, or falling to 0."""
        return self.config.lr * (1 - progress if self.config.anneal_lr else 1.0)

    def prepare(self, model: nn.Module, batch: Trajectory) -> Minibatch:
        """Advantages and the values' targets."""
        assert isinstance(model, ActorCritic)
        value, after = compute_values(model, batch)
        advantage = gae(
            batch.reward, value, after, batch.terminated, batch.truncated, batch.faulty,
            self.config.gamma, self.config.lam,
        )  # fmt: skip
        return flatten_steps(model, batch, value, advantage, advantage + value)

    def minibatches(self, batch: Minibatch, rng: torch.Generator) -> Iterator[Minibatch]:
        """Every row once per epoch, in a new order each time."""
        for _ in range(self.config.epochs):
            yield from shuffled(batch, self.config.minibatches, rng)

    def loss(self, model: nn.Module, target: nn.Module | None, batch: Minibatch, progress: float) -> LossOutput:
        """Clipped surrogate, value error and entropy."""
        assert isinstance(model, ActorCritic)
        config = self.config
        clip = config.clip * (1 - progress if config.anneal_clip else 1.0)
        if model.lean is not None and config.clip_value is None:
            output = explicit_loss(
                model, batch, lambda logp, advantage: _clipped(logp, batch.logp.numpy(), advantage, clip),
                normalize=config.normalize_advantage, value_coef=config.value_coef, entropy_coef=config.entropy,
            )  # fmt: skip
            output.stop = self.too_far(output.metrics["loss/kl"])
            return output
        advantage = normalized(batch.advantage, batch) if config.normalize_advantage else batch.advantage
        logp, entropy, value = evaluate(model, batch)
        log_ratio = logp - batch.logp
        ratio = log_ratio.exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        error = (value - batch.target).square()
        if config.clip_value is not None:
            near = batch.value + (value - batch.value).clamp(-config.clip_value, config.clip_value)
            error = torch.maximum(error, (near - batch.target).square())
        policy_loss, value_loss, spread = -mean(surrogate, batch), 0.5 * mean(error, batch), mean(entropy, batch)
        loss = policy_loss + config.value_coef * value_loss - config.entropy * spread
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
