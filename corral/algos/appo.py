"""Asynchronous PPO: the clipped surrogate of PPO on V-trace advantages, for data of a policy some updates older.

Maximises `min(r A, clip(r, 1 - eps, 1 + eps) A)` with `r = pi(a|s) / mu(a|s)`, `mu` the policy that acted. `A` is
V-trace's `r_s + gamma v_{s+1} - V(x_s)`, with the current network's probabilities and values; its own ratio is left
out, because the surrogate has it. `v_s` is the target of the value. Every minibatch is whole sequences, and corrected
anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from corral.acting.model_policy import ActorCriticPolicy, to_tensors
from corral.algos.base import Algorithm, ModelPolicy, require
from corral.algos.explicit import explicit_stale_loss
from corral.algos.trajectories import VtraceTargets, look
from corral.core.types import Array, DataSpec, EnvSpec, LossOutput, Trajectory, slice_envs
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import Optimizer, adam
from corral.ops.surrogate import clipped_surrogate


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
        self.max_grad_norm = config.max_grad_norm
        self.data = DataSpec(
            "sequence", config.length, config.batch_size, "once", ("action", "logp"),
            max_lag=config.max_lag * config.epochs * config.minibatches,  # every minibatch is a version
        )  # fmt: skip
        self.correct = VtraceTargets(config.gamma, config.rho_bar, config.c_bar, None)

    def build_model(self) -> ActorCritic:
        """Policy and value."""
        return ActorCritic(self.spec, self.config.net)

    def make_policy(self, model: nn.Module, *, explore: bool, rng: np.random.Generator, index: int = 0) -> ModelPolicy:
        """Sample, or take the most likely action."""
        assert isinstance(model, ActorCritic)
        return ActorCriticPolicy(model, explore, rng)

    def optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        """Adam with PPO's epsilon."""
        return adam(params, self.config.lr, eps=1e-5)

    def learning_rate(self, progress: float) -> float:
        """Constant, or falling to 0."""
        return self.config.lr * (1 - progress if self.config.anneal_lr else 1.0)

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

    def loss(self, model: nn.Module, target: nn.Module | None, batch: Trajectory, progress: float) -> LossOutput:
        """Clipped surrogate, value error and entropy; V-trace takes the same forward pass."""
        assert isinstance(model, ActorCritic)
        config = self.config
        if model.lean is not None:
            return explicit_stale_loss(
                model, batch, self.correct, self._policy_term, summed=False,
                value_coef=config.value_coef, entropy_coef=config.entropy,
            )  # fmt: skip
        seen = look(model, batch)
        logp, value, device = seen.logp.detach(), seen.value.detach(), seen.value.device
        targets = self.correct(batch, logp.cpu().numpy(), value.cpu().numpy(), seen.after)
        valid, behaviour, *targets = to_tensors((batch.valid, batch.extras["logp"], *targets), device)
        target_value, advantage = (part[valid] for part in targets)
        if config.normalize_advantage and len(advantage) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        log_ratio = (seen.logp - behaviour)[valid]
        ratio = log_ratio.exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - config.clip, 1 + config.clip) * advantage)
        policy_loss, spread = -surrogate.mean(), seen.entropy[valid].mean()
        value_loss = 0.5 * (seen.value[valid] - target_value).square().mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy * spread
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "loss/entropy": spread,
            "loss/kl": (ratio - 1 - log_ratio).mean(),
            "loss/clip_fraction": ((ratio - 1).abs() > config.clip).float().mean(),
        }
        return LossOutput(loss, metrics, rows=int(batch.valid.sum()))

    def _policy_term(self, logp: Array, behaviour: Array, advantage: Array) -> tuple[float, Array, dict[str, float]]:
        if self.config.normalize_advantage and len(advantage) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        result = clipped_surrogate(logp, behaviour, advantage, self.config.clip)
        return result.loss, result.grad, {"loss/kl": result.kl, "loss/clip_fraction": result.beyond}
