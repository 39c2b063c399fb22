"""What an algorithm is: a network, how to act with it, a loss, and the data it needs. Nothing else.

An algorithm never sees a process, a queue, or an optimizer step: topologies move its data, the learner steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corral.acting.policy import Policy
from corral.core.errors import UserError
from corral.core.types import Array, DataSpec, EnvSpec, LossOutput, Trajectory
from corral.ops.optim import Optimizer

Batch = Any
"""What `prepare` makes of a batch, and `losses` takes; each algorithm's own."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters of the network that have an optimizer, a learning rate and a clip of their own."""

    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    """Makes the optimizer of the learner's flat tensor."""
    learning_rate: Callable[[float], float]
    """Learning rate by progress."""
    max_grad_norm: float = inf
    """Gradients are scaled down to this norm."""
    name: str = ""
    prefixes: tuple[str, ...] = ("",)
    """Beginnings of the parameters' names; a parameter belongs to the group with the longest one that fits."""


@dataclass(frozen=True)
class UpdateContext:
    """What an update may depend on besides its batch."""

    progress: float
    """Share of the run's steps that are done, 0 to 1."""
    generator: torch.Generator
    """The learner's own random numbers, which are saved with it."""
    reward_scale: float = 1.0
    """What the batch's rewards were multiplied by."""


class Algorithm(ABC):
    """One algorithm with its settings, for one kind of environment.

    `progress` is the share of the run's steps that are done, 0 to 1; schedules are functions of it.
    """

    data: DataSpec
    spec: EnvSpec

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A network for the environment, freshly initialised."""

    @abstractmethod
    def make_policy(self, model: nn.Module, *, explore: bool, rng: np.random.Generator, index: int = 0) -> Policy:
        """How to act with the network; `index` tells actors that explore differently apart."""

    def eval_policy(self, model: nn.Module, *, deterministic: bool, rng: np.random.Generator) -> Policy:
        """How to act in evaluations, by the best actions or by sampling; by default as in training."""
        return self.make_policy(model, explore=not deterministic, rng=rng)

    @abstractmethod
    def groups(self) -> Sequence[ParamGroup]:
        """The parameter groups, in the order in which `losses` yields them; most algorithms have one."""

    @abstractmethod
    def losses(
        self, model: nn.Module, target: nn.Module | None, batch: Batch, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        """Losses of one minibatch, one for each group in order.

        The learner steps a group before it asks for the next loss, so a later one sees the new weights. Gradients
        that a loss has outside of its own group are discarded: nothing needs to be frozen.
        """

    def fragment_steps(self, num_envs: int) -> int:
        """Steps of each environment between two calls of the store."""
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
        """Whether `losses` needs a target network."""
        return False


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
