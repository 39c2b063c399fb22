"""The interface of an algorithm: a network, a policy, a loss, and the data it needs.

An algorithm never sees a process, a queue, or an optimizer step: topologies move its data, and the learner applies its
gradients.
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

Model = Any
"""The network that `build_model` returns; the type depends on the algorithm."""
Batch = Any
"""What `prepare` returns and `losses` takes; the type depends on the algorithm."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters of the network with their own optimizer, learning rate and clip."""

    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    """Makes the optimizer of the learner's flat tensor."""
    learning_rate: Callable[[float], float]
    """Learning rate by progress."""
    max_grad_norm: float = inf
    """Gradients are scaled down to this norm."""
    name: str = ""
    prefixes: tuple[str, ...] = ("",)
    """Prefixes of parameter names; a parameter belongs to the group with the longest matching one."""

    def __post_init__(self) -> None:
        given: Any = self.prefixes
        if isinstance(given, str):
            raise UserError(f"prefixes of a ParamGroup is a tuple: write ({given!r},).")


@dataclass(frozen=True)
class UpdateContext:
    """Inputs of an update besides its batch."""

    progress: float
    """Fraction of the run's steps that are done, 0 to 1."""
    generator: torch.Generator
    """The learner's RNG, which is saved with it."""
    reward_scale: float = 1.0
    """Scale of the batch's rewards relative to the unscaled ones, averaged over actors; 1 unless normalised."""


class Algorithm(ABC):
    """One algorithm with its settings, for one environment specification.

    `progress` is the fraction of the run's steps that are done, 0 to 1; schedules are functions of it.
    """

    data: DataSpec
    spec: EnvSpec
    uses_target: bool = False
    """Whether `losses` gets a target network."""
    uses_action_masks: bool = False
    """Whether it takes only actions that the environment's mask allows."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A newly initialised network for the environment."""

    @abstractmethod
    def make_policy(self, model: Model, *, explore: bool, rng: np.random.Generator, index: int = 0) -> Policy:
        """The policy that acts with the network; `index` distinguishes actors that explore differently."""

    def eval_policy(self, model: Model, *, deterministic: bool, rng: np.random.Generator) -> Policy:
        """The policy for evaluations, deterministic or sampling; by default as in training."""
        return self.make_policy(model, explore=not deterministic, rng=rng)

    @abstractmethod
    def groups(self) -> Sequence[ParamGroup]:
        """The parameter groups, in the order in which `losses` yields them; most algorithms have one."""

    @abstractmethod
    def losses(self, model: Model, target: Model | None, batch: Batch, ctx: UpdateContext) -> Iterator[LossOutput]:
        """Losses of one minibatch, one for each group in order.

        The learner steps a group before it asks for the next loss, so a later loss sees the new weights. Gradients of a
        loss outside its own group are discarded: nothing needs to be frozen.
        """

    def fragment_steps(self, num_envs: int) -> int:
        """Steps of each environment per fragment."""
        return self.data.length

    def prepare(self, model: Model, batch: Batch) -> Batch:
        """Targets that need no gradient, such as advantages, computed once for the whole batch."""
        return batch

    def minibatches(self, batch: Batch, rng: torch.Generator) -> Iterator[Batch]:
        yield batch

    def priorities(self, model: Model, traj: Trajectory) -> Array | None:
        """Initial priorities `[T, B]` of transitions, by the behaviour network; None: the store's default."""
        return None

    def update_target(self, model: Model, target: Model, version: int) -> None:  # noqa: B027 - few have one
        """Update the target network, after update number `version`."""


def require(
    name: str, value: float, *, minimum: float | None = None, maximum: float | None = None, above: float | None = None
) -> None:
    """Raise UserError unless a number is within its bounds."""
    if minimum is not None and not value >= minimum:
        raise UserError(f"{name} must be at least {minimum:g}, got {value:g}.")
    if maximum is not None and not value <= maximum:
        raise UserError(f"{name} must be at most {maximum:g}, got {value:g}.")
    if above is not None and not value > above:
        raise UserError(f"{name} must be above {above:g}, got {value:g}.")
