"""The interface between a learner and the exchange of its gradients and weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from corral.algos.base import ParamGroup
from corral.core.errors import UserError
from corral.core.imports import import_named
from corral.learn.exchange.config import EXCHANGES, DataParallelConfig

GradAction = Literal["apply", "skip", "stop"]


class Exchange:
    """Called by the learner before and after the optimizer step. This one is of a single learner and shares nothing."""

    over = False
    """Whether the current update is the last one of some learner's batch, and therefore of all."""
    clips_first = False
    """Whether each learner clips its gradient before sending it, instead of clipping the mean."""

    def agree(self, ready: bool) -> bool:
        """Whether all learners that an update needs have data for it."""
        return ready

    def grads(
        self, grad: Tensor, rows: int, lr: float, *, group: int = 0, stop: bool = False, last: bool = False
    ) -> GradAction:
        """Share the gradient of parameter group `group` and replace it with the combined gradient of all learners.

        It is a mean over `rows` rows, or a sum if `rows` is 0, to be applied with learning rate `lr`. Returns apply:
        clip it and step; skip: a server has applied it and the weights are new; stop: no more updates from this batch.
        `last` marks the last minibatch of this learner's batch.
        """
        return "stop" if stop else "apply"

    def params(self, weights: Tensor) -> None:
        """Share the weights after all groups were updated."""

    def share(self, values: Tensor) -> list[Tensor]:
        """Exchange observation moments: returns this learner's own and those newly received from others."""
        return [values]


@dataclass(frozen=True)
class ExchangeSetup:
    """Arguments for building one learner's side of an exchange."""

    config: DataParallelConfig
    model: nn.Module
    groups: Sequence[ParamGroup]
    host: str
    """This machine's own address."""
    secret: bytes
    """Shared secret that authenticates learners."""
    seed: int


class GroupExchange(Exchange, ABC):
    """An exchange between several learners, which join, and then work for a turn at a time."""

    rendezvous: ClassVar[str]
    """`module:Class` of how the workers meet, a `Rendezvous` of `corral.topologies.rendezvous`."""

    sent: float
    """Bytes sent since the start; with a server, also bytes received."""

    port = 0
    """Where other learners connect to this one; 0 if it does not listen."""

    @classmethod
    @abstractmethod
    def make(cls, setup: ExchangeSetup) -> GroupExchange:
        """One learner's side, before it has joined the others."""

    @abstractmethod
    def join(self, *where: Any) -> None:
        """Connect to the others; PeerLost on timeout. Joining again leaves the previous group."""

    def begin(self, weights: Tensor, turn: int, num_workers: int) -> None:
        """Begin a turn of `num_workers` learners with these weights, which the exchange may change from now on."""

    def end(self) -> None:
        """End this learner's turn; other learners stop waiting for it."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the group; learners that wait for this one are notified."""

    def close(self) -> None:
        """Leave the group for good, and stop listening."""
        self.leave()

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Bytes and other figures since the start."""


def find_exchange(name: str) -> Any:
    """The class of the exchange of that name, or of `module:Class`."""
    try:
        module, _, attribute = EXCHANGES.get(name, name).partition(":")
        if not attribute:
            raise ValueError("it is not module:Class")
        return attrgetter(attribute)(import_named(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"No exchange {name!r}: {error}; give one of {', '.join(EXCHANGES)}, or module:Class."
        ) from None


def make_exchange(setup: ExchangeSetup) -> GroupExchange:
    """One learner's side of the exchange."""
    made: GroupExchange = find_exchange(setup.config.exchange).make(setup)
    return made


class PeerLost(Exception):
    """Another learner or a server disconnected or timed out; the exchange is unusable until `join`."""
