"""Importance-weighted actor-learner (Espeholt et al. 2018, IMPALA): one update per batch of sequences, corrected.

The policy that acted may be some updates older than the one that learns. V-trace corrects for it with the current
network's probabilities and values: `v_s` is the target of the value, and the policy follows
`rho_s grad log pi(a_s|x_s) (r_s + gamma v_{s+1} - V(x_s))`. Losses are sums over the rows of a batch, not means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from corral.acting.model_policy import ActorCriticPolicy, to_tensors
from corral.algos.base import Algorithm, ModelPolicy, require
from corral.algos.explicit import explicit_stale_loss, policy_gradient
from corral.algos.trajectories import VtraceTargets, look
from corral.core.types import Array, DataSpec, EnvSpec, LossOutput, Trajectory
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import Optimizer, adam, rmsprop


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
    """Clip of the importance ratio of each step; sets which policy's value function the targets converge to."""
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
        require("learning_rate", self.learning_rate, above=0, most=100)
        require("gamma", self.gamma, least=0, most=1)
        for name in ("num_steps", "batch_size", "buffer_size", "max_policy_lag"):
            require(name, getattr(self, name), least=1)
        for name in ("max_grad_norm", "vtrace_rho", "vtrace_c"):
            require(name, getattr(self, name), above=0)
        require("replay_fraction", self.replay_fraction, least=0, most=0.95)


class Impala(Algorithm):
    """IMPALA for one kind of environment."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self.max_grad_norm = config.max_grad_norm
        self.data = DataSpec(
            "sequence", config.num_steps, config.batch_size, "once", ("action", "logp"), config.max_policy_lag,
            capacity=config.buffer_size, replayed=config.replay_fraction,
        )  # fmt: skip
        self.correct = VtraceTargets(
            config.gamma, config.vtrace_rho, config.vtrace_c, config.vtrace_rho, on=config.vtrace
        )

    def build_model(self) -> ActorCritic:
        """Policy and value."""
        return ActorCritic(self.spec, self.config.net)

    def make_policy(self, model: nn.Module, *, explore: bool, rng: np.random.Generator, index: int = 0) -> ModelPolicy:
        """Sample, or take the most likely action."""
        assert isinstance(model, ActorCritic)
        return ActorCriticPolicy(model, explore, rng)

    def optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        """RMSProp with the paper's constants, or Adam."""
        if self.config.optimizer == "adam":
            return adam(params, self.config.learning_rate, eps=1e-5)
        return rmsprop(params, self.config.learning_rate, decay=0.99, eps=0.01)

    def learning_rate(self, progress: float) -> float:
        """Constant, or falling to 0."""
        return self.config.learning_rate * (1 - progress if self.config.anneal_lr else 1.0)

    def minibatches(self, batch: Trajectory, rng: torch.Generator) -> Iterator[Trajectory]:
        """All sequences, unless every row was faulty."""
        if not batch.faulty.all():
            yield batch

    def loss(self, model: nn.Module, target: nn.Module | None, batch: Trajectory, progress: float) -> LossOutput:
        """Policy gradient, value error and entropy, summed; V-trace takes the same forward pass."""
        assert isinstance(model, ActorCritic)
        config = self.config
        if model.lean is not None:
            return explicit_stale_loss(
                model, batch, self.correct, _policy_term, summed=True,
                value_coef=config.vf_coef, entropy_coef=config.ent_coef,
            )  # fmt: skip
        seen = look(model, batch)
        logp, value, device = seen.logp.detach(), seen.value.detach(), seen.value.device
        targets = self.correct(batch, logp.cpu().numpy(), value.cpu().numpy(), seen.after)
        target_value, advantage = to_tensors(targets, device)
        valid, behaviour = to_tensors((batch.valid, batch.extras["logp"]), device)
        policy_loss = -(seen.logp * advantage)[valid].mean()
        value_loss = 0.5 * (seen.value - target_value)[valid].square().mean()
        spread = seen.entropy[valid].mean()
        loss = (policy_loss + config.vf_coef * value_loss - config.ent_coef * spread) * valid.sum()
        log_ratio = (logp - behaviour)[valid]
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "loss/entropy": spread,
            "loss/kl": (log_ratio.exp() - 1 - log_ratio).mean(),
        }
        return LossOutput(loss, metrics, rows=0)


def _policy_term(logp: Array, behaviour: Array, advantage: Array) -> tuple[float, Array, dict[str, float]]:
    loss, grad, _ = policy_gradient(logp, advantage)
    log_ratio = logp - behaviour
    return loss, grad, {"loss/kl": float((np.exp(log_ratio) - 1 - log_ratio).mean())}
