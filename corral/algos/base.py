"""What an algorithm is: a network, how to act with it, a loss, and the data it needs. Nothing else.

An algorithm never sees a process, a queue, or an optimizer step: topologies move its data, the learner steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from corral.acting.policy import Policy
from corral.core.errors import UserError
from corral.core.types import Array, DataSpec, EnvSpec, LossOutput, Trajectory
from corral.ops.optim import Optimizer

Batch = Any
"""What `prepare` makes of a batch, and `loss` takes; each algorithm's own."""


class Algorithm(ABC):
    """One algorithm with its settings, for one kind of environment.

    `progress` is the share of the run's steps that are done, 0 to 1; schedules are functions of it.
    """

    data: DataSpec
    max_grad_norm: float
    spec: EnvSpec

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A network for the environment, freshly initialised."""

    @abstractmethod
    def make_policy(self, model: nn.Module, *, explore: bool, rng: np.random.Generator, index: int = 0) -> ModelPolicy:
        """How to act with the network; `index` tells actors that explore differently apart."""

    def eval_policy(self, model: nn.Module, *, deterministic: bool, rng: np.random.Generator) -> ModelPolicy:
        """How to act in evaluations, by the best actions or by sampling; by default as in training."""
        return self.make_policy(model, explore=not deterministic, rng=rng)

    @abstractmethod
    def loss(self, model: nn.Module, target: nn.Module | None, batch: Batch, progress: float) -> LossOutput:
        """Loss of one minibatch, with its graph."""

    @abstractmethod
    def optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        """The optimizer, over the learner's one flat parameter."""

    @abstractmethod
    def learning_rate(self, progress: float) -> float:
        """Learning rate now."""

    def fragment_steps(self, num_envs: int) -> int:
        """Steps of each environment between two looks at the store."""
        return self.data.length

    def prepare(self, model: nn.Module, batch: Batch) -> Batch:
        """Targets that need no gradient, such as advantages, computed once for the whole batch."""
        return batch

    def minibatches(self, batch: Batch, rng: torch.Generator) -> Iterator[Batch]:
        """The batch in the pieces to learn from, one after the other."""
        yield batch

    def priorities(self, model: nn.Module, traj: Trajectory) -> Array | None:
        """First priorities `[T, B]` of the transitions of a fragment, by the network that acted; None: the store's."""
        return None

    def update_target(self, model: nn.Module, target: nn.Module, version: int) -> None:  # noqa: B027 - few have one
        """Move the target network, after update number `version`."""

    @property
    def uses_target(self) -> bool:
        """Whether `loss` wants a target network."""
        return False


class ModelPolicy(Policy, Protocol):
    """A policy that acts with a network and follows a schedule."""

    progress: float
    """Share of the run's steps done; set by whoever runs it."""


# Checks of settings, as sentences.


def require(
    name: str, value: float, *, least: float | None = None, most: float | None = None, above: float | None = None
) -> None:
    """UserError unless a number is within its bounds."""
    if least is not None and not value >= least:
        raise UserError(f"{name} must be at least {least:g}, got {value:g}.")
    if most is not None and not value <= most:
        raise UserError(f"{name} must be at most {most:g}, got {value:g}.")
    if above is not None and not value > above:
        raise UserError(f"{name} must be above {above:g}, got {value:g}.")
