"""REINFORCE (Williams 1992): follow `grad log pi(a|s) G` over whole episodes.

`G` is the discounted return that followed, normalised over the batch of episodes. With `baseline` a value is
learned and subtracted, and an episode cut off by a time limit goes on in its last observation's value; without
one such an episode counts as if it had ended.

Episodes are used when they end, so those under way when the network changes were begun by an older one. Taking
only newer ones would prefer short episodes, which is worse; with fewer `episodes` than environments the lag grows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, nn

from corral.acting.model_policy import ActorCriticPolicy
from corral.algos.base import Algorithm, ModelPolicy, require
from corral.algos.explicit import explicit_loss, policy_gradient
from corral.algos.trajectories import Minibatch, compute_values, count, evaluate, flatten_steps, mean, normalized
from corral.core.errors import UserError
from corral.core.types import DataSpec, EnvSpec, LossOutput, Trajectory
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import Optimizer, adam
from corral.ops.returns import discounted_return

_FRAGMENT = 32


@dataclass(frozen=True)
class Config:
    """Settings of REINFORCE."""

    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    anneal_lr: bool = False
    """Decay the learning rate linearly to 0."""
    gamma: float = 0.99
    """Discount."""
    episodes_per_update: int = 8
    """Whole episodes in an update."""
    baseline: bool = True
    """Learn a value and subtract it from the returns."""
    normalize_advantage: bool = True
    """Normalize the returns, or the advantages over the baseline, within each update."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the baseline's loss, 0.5 * (V - R)^2."""
    max_grad_norm: float = 0.5
    """Maximum gradient norm."""
    net: NetConfig = field(default_factory=NetConfig)
    """The network."""

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, above=0, most=100)
        require("gamma", self.gamma, least=0, most=1)
        require("episodes_per_update", self.episodes_per_update, least=1)
        require("max_grad_norm", self.max_grad_norm, above=0)
        if self.net.rnn != "none":
            raise UserError("REINFORCE does not support recurrent networks: set rnn=none, or use a2c or ppo.")


class Reinforce(Algorithm):
    """REINFORCE for one kind of environment."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self.max_grad_norm = config.max_grad_norm
        self.data = DataSpec("episode", _FRAGMENT, config.episodes_per_update, "once", ("action", "logp"), max_lag=0)

    def build_model(self) -> ActorCritic:
        """Policy and baseline."""
        return ActorCritic(self.spec, self.config.net)

    def make_policy(self, model: nn.Module, *, explore: bool, rng: np.random.Generator, index: int = 0) -> ModelPolicy:
        """Sample, or take the most likely action."""
        assert isinstance(model, ActorCritic)
        return ActorCriticPolicy(model, explore, rng)

    def optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        """Adam."""
        return adam(params, self.config.learning_rate)

    def learning_rate(self, progress: float) -> float:
        """Constant, or falling to 0."""
        return self.config.learning_rate * (1 - progress if self.config.anneal_lr else 1.0)

    def prepare(self, model: nn.Module, batch: Trajectory) -> Minibatch:
        """Returns to go, and what they exceed the baseline by."""
        assert isinstance(model, ActorCritic)
        value = after = np.zeros_like(batch.reward)
        if self.config.baseline:
            value, after = compute_values(model, batch)
        returns = discounted_return(
            batch.reward, after, batch.terminated, batch.truncated, batch.faulty, self.config.gamma
        )
        return flatten_steps(model, batch, value, returns - value, returns)

    def loss(self, model: nn.Module, target: nn.Module | None, batch: Minibatch, progress: float) -> LossOutput:
        """Policy gradient, the baseline's error, and entropy."""
        assert isinstance(model, ActorCritic)
        config = self.config
        if model.lean is not None and config.baseline:
            return explicit_loss(
                model, batch, policy_gradient, normalize=config.normalize_advantage,
                value_coef=config.vf_coef, entropy_coef=config.ent_coef,
            )  # fmt: skip
        advantage = normalized(batch.advantage, batch) if config.normalize_advantage else batch.advantage
        logp, entropy, value = evaluate(model, batch)
        policy_loss, spread = -mean(logp * advantage, batch), mean(entropy, batch)
        loss = policy_loss - config.ent_coef * spread
        metrics = {"loss/policy": policy_loss, "loss/entropy": spread}
        if config.baseline:
            value_loss = 0.5 * mean((value - batch.target).square(), batch)
            loss = loss + config.vf_coef * value_loss
            metrics["loss/value"] = value_loss
        return LossOutput(loss, metrics, rows=count(batch))
