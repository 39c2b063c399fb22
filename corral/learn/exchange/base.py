"""What a learner does with its gradients and weights besides using them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from corral.algos.base import ParamGroup
from corral.learn.exchange.config import DataParallelConfig

GradAction = Literal["apply", "skip", "stop"]


class Exchange(Protocol):
    """Called by the learner around the optimizer."""

    over: bool
    """Whether the update under way is the last of somebody's batch, and so of everybody's."""
    clips_first: bool
    """Whether a learner's gradient is clipped by itself, before it leaves, instead of everybody's mean."""

    def agree(self, ready: bool) -> bool:
        """Whether everybody without whom no update is made has data for one."""

    def grads(
        self, grad: Tensor, rows: int, lr: float, *, group: int = 0, stop: bool = False, last: bool = False
    ) -> GradAction:
        """Share the gradient of parameter group number `group`, and put that of all learners in its place.

        It is the mean over `rows` rows, or a sum if that is 0, and to be applied with this rate. apply: clip it and
        step; skip: a server has done that, and the weights are new; stop: no more updates from this batch.
        `last` says that this is the last minibatch of this learner's batch.
        """

    def params(self, weights: Tensor) -> None:
        """Share the weights after an update of all groups."""

    def share(self, values: Tensor) -> list[Tensor]:
        """Moments of observations: this learner's own, and those of others that it has not been given yet."""


@dataclass(frozen=True)
class ExchangeSetup:
    """What one learner's side of an exchange is made from."""

    config: DataParallelConfig
    model: nn.Module
    groups: Sequence[ParamGroup]
    host: str
    """This machine's own address."""
    secret: bytes
    """What the others are let in by."""
    seed: int


class Joint(Exchange, Protocol):
    """An exchange of several learners, which meet, and then work for a turn at a time."""

    rendezvous: ClassVar[str]
    """`module:Class` of how the workers meet; new ones are written in `corral.topologies.rendezvous`."""

    sent: float
    """Bytes that went out of here, and with a server also those that came in, since the beginning."""

    @classmethod
    def make(cls, setup: ExchangeSetup) -> Joint:
        """One learner's side, before it has met the others."""

    def join(self, *where: Any) -> None:
        """Meet the others; PeerLost when they do not come in time. Joining again leaves those of before."""

    def begin(self, weights: Tensor, turn: int, num_workers: int) -> None:
        """A turn of `num_workers` learners begins, with these weights, which the exchange may change from now on."""

    def end(self) -> None:
        """The turn is over for this learner: nobody is to wait for it until it begins another."""

    def leave(self) -> None:
        """Leave the others; whoever waits for this learner notices."""

    def metrics(self) -> dict[str, float]:
        """Bytes and whatever else there is to tell, since the beginning."""


class PeerLost(Exception):
    """Another learner, or a server, is gone, or has not come in time; the exchange is of no use until `join`."""


# One learner alone.


class Local:
    """Keeps gradients and weights to itself."""

    over = False  # it knows itself
    clips_first = False

    def agree(self, ready: bool) -> bool:
        """Whether it is ready."""
        return ready

    def grads(
        self, grad: Tensor, rows: int, lr: float, *, group: int = 0, stop: bool = False, last: bool = False
    ) -> GradAction:
        """Apply them."""
        return "stop" if stop else "apply"

    def params(self, weights: Tensor) -> None:
        """Keep them."""

    def share(self, values: Tensor) -> list[Tensor]:
        """Its own."""
        return [values]
