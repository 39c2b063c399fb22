"""The counting agent: a test algorithm that learns nothing and detects lost, repeated or reordered data.

With `CountingEnv`, whose observations are (id, episode, step of the episode, step of its life), `gaps` finds every step
that a topology lost, repeated or reordered; equal weights mean that equal data came in equal order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from corral.acting.policy import Policy
from corral.algos.base import Algorithm, ParamGroup, UpdateContext
from corral.core.types import Array, DataSpec, EnvSpec, LossOutput, Trajectory, Tree
from corral.ops.optim import adam


@dataclass(frozen=True)
class Config:
    """Settings of the counting agent."""

    num_steps: int = 5
    """Steps in a sequence."""
    batch_size: int = 4
    """Sequences in an update."""
    max_policy_lag: int | None = None
    """Maximum age of data, in versions."""


class Counting(Algorithm):
    """Its one weight follows the sum of everything it has seen, each term weighted by its position."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self.data = DataSpec(
            "sequence", config.num_steps, config.batch_size, "once", ("seen",), max_lag=config.max_policy_lag
        )

    def build_model(self) -> nn.Module:
        return _OneWeight()

    def make_policy(self, model: nn.Module, *, explore: bool, rng: np.random.Generator, index: int = 0) -> Policy:
        return _CountingPolicy()

    def groups(self) -> Sequence[ParamGroup]:
        return [ParamGroup(partial(adam, lr=0.1), lambda progress: 0.1)]

    def losses(
        self, model: nn.Module, target: nn.Module | None, batch: Trajectory, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        """A sum that depends on the order of everything in the batch."""
        assert isinstance(model, _OneWeight)
        rows = np.asarray(batch.obs[:-1, :, 1:], np.float64).reshape(-1)
        total = float(np.dot(rows, np.sin(1 + np.arange(len(rows))))) + float(batch.reward.sum())
        loss = (model.weight * total).sum() + model.weight.square().sum()
        yield LossOutput(loss, {"loss/total": loss.detach()})


class _OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


class _CountingPolicy:
    def initial_state(self, n: int) -> Tree:
        return np.zeros(n, np.int64)

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        return (obs[:, 3].astype(np.int64) % 3), state + 1, {"seen": state}


def gaps(trajectories: Iterable[Trajectory]) -> list[str]:
    """Errors in trajectories of `CountingEnv` under the counting agent, in the order they came. An environment that
    restarts in a replacement process begins at 0 again and marks it by `first`.
    """
    found: list[str] = []
    latest: dict[int, tuple[float, float, bool]] = {}  # life, the policy's count, whether an episode begins
    for number, traj in enumerate(trajectories):
        steps = traj.shape[0]
        for column, env_id in enumerate(traj.env_id.tolist()):
            where = f"fragment {number}, environment {env_id}"
            life, seen = traj.obs[:, column, 3], traj.extras["seen"][:, column]
            if not np.array_equal(np.diff(life), np.ones(steps)):
                found.append(f"{where}: steps {life.tolist()} are not consecutive")
            if not np.array_equal(np.diff(seen), np.ones(steps - 1)):
                found.append(f"{where}: the policy's own count {seen.tolist()} is not consecutive")
            anew = life[0] == 0 and bool(traj.first[0, column])
            before = latest.get(env_id)
            if before is not None and not anew and (life[0], seen[0]) != (before[0], before[1]):
                found.append(f"{where}: begins at step {life[0]:.0f}, count {seen[0]}, after {before}")
            if before is None and not anew:
                found.append(f"{where}: its beginning is missing")
            if not np.array_equal(traj.action[:, column], life[:-1].astype(np.int64) % 3):
                found.append(f"{where}: actions are not those of the observations")
            latest[env_id] = (float(life[-1]), float(seen[-1] + 1), bool(traj.first[-1, column]))
    return found
