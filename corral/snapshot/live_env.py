"""Environments that act: what they last showed, how they came there, and what is to be told when a state is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod

from corral.core.types import Array
from corral.snapshot.keeper import Beginning, Env


class Acting(ABC):
    """One environment that others step."""

    @property
    @abstractmethod
    def env(self) -> Env:
        """The environment itself."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether its episode has ended, and no other has begun."""

    @abstractmethod
    def record(self) -> None:
        """From now on note what leads to where it is."""

    @abstractmethod
    def shown(self) -> list[Array] | None:
        """Leaves of the observation that it showed last, as copies; None when that is not known."""

    @abstractmethod
    def beginning(self) -> Beginning | None:
        """What leads there; None where that is not known."""

    @abstractmethod
    def loaded(self, obs: list[Array] | None, over: bool, beginning: Beginning | None) -> None:
        """It was put into a state where it showed this, and which `beginning` leads to, if anything is known to."""

    def release(self) -> None:  # noqa: B027 - most are not watched
        """Let it be as if nobody had looked."""
