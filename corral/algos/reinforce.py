"""REINFORCE (Williams 1992): follow `grad log pi(a|s) G` over whole episodes.

`G` is the discounted return-to-go, normalised over the batch of episodes. With `baseline` a value is learned and
subtracted, and a truncated episode bootstraps from the value of its final observation; without it, truncation counts as
termination.

Episodes are used when they end, so those in flight during an update were begun by an older network. Using only newer
ones would bias towards short episodes, which is worse; with fewer `episodes_per_update` than environments the lag
grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from corral.algos.base import ParamGroup, UpdateContext, require
from corral.algos.schedule import one_group
from corral.algos.trajectories import (
    ActorCriticAlgorithm,
    Minibatch,
    compute_values,
    evaluate_actions,
    flatten_steps,
    masked_mean,
    normalize,
    num_valid,
)
from corral.core.errors import UserError
from corral.core.types import DataSpec, EnvSpec, LossOutput, Trajectory
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import adam
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
        require("learning_rate", self.learning_rate, above=0, maximum=100)
        require("gamma", self.gamma, minimum=0, maximum=1)
        require("episodes_per_update", self.episodes_per_update, minimum=1)
        require("max_grad_norm", self.max_grad_norm, above=0)
        if self.net.rnn != "none":
            raise UserError("REINFORCE does not support recurrent networks: set rnn=none, or use a2c or ppo.")


class Reinforce(ActorCriticAlgorithm[Config]):
    """REINFORCE for one environment specification."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self.data = DataSpec("episode", _FRAGMENT, config.episodes_per_update, "once", ("action", "logp"), max_lag=0)

    def groups(self) -> Sequence[ParamGroup]:
        return one_group(self.config, adam)

    def prepare(self, model: ActorCritic, batch: Trajectory) -> Minibatch:
        values = next_values = np.zeros_like(batch.reward)
        if self.config.baseline:
            values, next_values = compute_values(model, batch)
        returns = discounted_return(
            batch.reward, next_values, batch.terminated, batch.truncated, batch.faulty, self.config.gamma
        )
        return flatten_steps(model, batch, values, returns - values, returns)

    def losses(
        self, model: ActorCritic, target: nn.Module | None, batch: Minibatch, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        config, mask = self.config, batch.mask
        advantages = normalize(batch.advantages, mask) if config.normalize_advantage else batch.advantages
        log_prob, entropy, values = evaluate_actions(model, batch)
        policy_loss, entropy_mean = -masked_mean(log_prob * advantages, mask), masked_mean(entropy, mask)
        loss = policy_loss - config.ent_coef * entropy_mean
        metrics = {"loss/policy": policy_loss, "loss/entropy": entropy_mean}
        if config.baseline:
            value_loss = 0.5 * masked_mean((values - batch.returns).square(), mask)
            loss = loss + config.vf_coef * value_loss
            metrics["loss/value"] = value_loss
        yield LossOutput(loss, metrics, rows=num_valid(batch))
