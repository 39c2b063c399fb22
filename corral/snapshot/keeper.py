"""What a way to keep states of environments offers, to planners in this process and to simulators over the link."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium

Env = gymnasium.Env[Any, Any]


@dataclass(frozen=True)
class EpisodeStart:
    """What leads an environment of the same make to where one is."""

    repeat: Callable[[Env], Any]
    """Does it all again, and returns the last observation; CannotKeep when that led elsewhere."""
    nbytes: int


Tape = Callable[[], EpisodeStart | None]
"""How an environment that others step came to be where it is; None where that is not known."""


class CannotSave(Exception):
    """This environment's state cannot be kept, or this is no state of it."""


class StateKeeper(ABC):
    """A way to keep states. `level` is one of `planning.states.Level`; `capabilities` are what HELLO says of it.

    Environments that states are put into are of the same make as those they were kept from, and have been reset.
    """

    level: int
    exact = True
    """Whether what follows a state that was put back is, bit by bit, what would have followed."""
    capabilities: tuple[str, ...] = ()
    throws_dice = False
    """Whether steps are known to be random, whatever `dice` shows."""

    @abstractmethod
    def keep(self, env: Env, tape: Tape | None = None) -> Any:
        """What the environment's state is kept as. It does not change with the environment, which stays as it is.

        `tape` is of an environment that others step; those that states were put into are known.
        """

    @abstractmethod
    def put(self, env: Env, kept: Any) -> None:
        """Bring an environment into a state, generators included."""

    @abstractmethod
    def reseed(self, env: Env, seed: int) -> None:
        """Give an environment other dice than its state has; the same seed gives the same."""

    @abstractmethod
    def dice(self, env: Env) -> Any:
        """Where the generators are of an environment that a state was put into; `==` says whether they moved."""

    @abstractmethod
    def nbytes(self, kept: Any) -> int:
        """What it takes to keep."""

    def step(self, env: Env, action: Any) -> Any:
        """Step an environment that a state was put into."""
        return env.step(action)

    def leave(self, env: Env) -> None:  # noqa: B027 - most need not know
        """Others step this environment from now on, which a state was put into."""

    def drop(self, kept: Any) -> None:  # noqa: B027 - Python does it
        """Let go of a state."""
