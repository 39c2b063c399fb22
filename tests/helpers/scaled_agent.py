"""The counting agent with what it is told about the scale of rewards; for runs in this process."""

from typing import ClassVar

import numpy as np

from corral.testing.counting_agent import Config, Counting

__all__ = ["Config", "Scaled"]


class Scaled(Counting):
    """Its learners, of which there may be several, note the scale of every update; its policy records it."""

    updates: ClassVar[list] = []  # scale by the context, and by the batch itself

    def make_policy(self, model, *, explore, rng, index=0):
        return _ScaledPolicy(super().make_policy(model, explore=explore, rng=rng, index=index))

    def losses(self, model, target, batch, ctx):
        self.updates.append((ctx.reward_scale, float(batch.reward.sum() / batch.raw_reward.sum())))
        yield from super().losses(model, target, batch, ctx)


class _ScaledPolicy:
    def __init__(self, policy):
        self._policy, self.initial_state, self._scale = policy, policy.initial_state, None

    def set_context(self, ctx):
        self._scale = ctx.reward_scale

    def act(self, obs, state, first):
        action, state, extras = self._policy.act(obs, state, first)
        return action, state, extras | {"scale": np.full(len(first), self._scale)}
