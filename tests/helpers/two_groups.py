"""An actor-critic with two parameter groups, each with its own optimizer, learning rate and clip."""

from dataclasses import dataclass, field
from functools import partial

import torch

from corral.acting.model_policy import ActorCriticPolicy
from corral.algos.base import Algorithm, ParamGroup
from corral.algos.schedule import linear_decay
from corral.algos.trajectories import compute_values, evaluate_actions, flatten_steps, masked_mean, num_valid
from corral.core.types import DataSpec, LossOutput
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import adam, rmsprop
from corral.ops.returns import gae


@dataclass(frozen=True)
class Config:
    actor_lr: float = 1e-3
    critic_lr: float = 3e-3
    gamma: float = 0.98
    num_rows: int = 16
    noise: float = 0.01
    anneal: bool = True
    net: NetConfig = field(default_factory=NetConfig)


class TwoGroups(Algorithm):
    """The critic learns first; the actor's loss uses the critic as it is after its step, and random numbers."""

    def __init__(self, config, spec, num_envs):
        self.config, self.spec = config, spec
        self.data = DataSpec("sequence", config.num_rows, num_envs, "once", ("action", "logp"), max_lag=0)

    def build_model(self):
        return ActorCritic(self.spec, self.config.net)

    def make_policy(self, model, *, explore, rng, index=0):
        return ActorCriticPolicy(model, explore, rng)

    def groups(self):
        config = self.config
        return [
            ParamGroup(
                partial(rmsprop, lr=config.critic_lr, decay=0.99, eps=1e-5),
                linear_decay(config.critic_lr, on=False),
                0.5,
                "critic",
                ("value_",),
            ),
            ParamGroup(
                partial(adam, lr=config.actor_lr),
                linear_decay(config.actor_lr, on=config.anneal),
                0.2,
                "actor",
                ("policy_", "log_std"),
            ),
        ]

    def prepare(self, model, batch):
        values, next_values = compute_values(model, batch)
        ends = batch.terminated, batch.truncated, batch.faulty
        advantages = gae(batch.reward, values, next_values, *ends, self.config.gamma, 0.9)
        return flatten_steps(model, batch, values, advantages, advantages + values)

    def minibatches(self, batch, rng):
        if len(batch):
            yield batch

    def losses(self, model, target, batch, ctx):
        _, _, values = evaluate_actions(model, batch)
        value_loss = masked_mean((values - batch.returns).square(), batch.mask)
        yield LossOutput(value_loss, {"loss/value": value_loss}, rows=num_valid(batch), group="critic")
        log_prob, entropy, values = evaluate_actions(model, batch)
        noise = torch.randn(batch.returns.shape, generator=ctx.generator)
        advantages = (batch.returns - values.detach()) + self.config.noise * noise
        # The critic's part of this loss has a gradient, which is to be discarded.
        loss = masked_mean(-log_prob * advantages - 0.01 * entropy + 100 * values, batch.mask)
        yield LossOutput(loss, {"loss/policy": loss}, rows=num_valid(batch), group="actor")
