"""`StateKeeper`: how the state of one environment is kept and restored, for planners and for simulators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium

Env = gymnasium.Env[Any, Any]


@dataclass(frozen=True)
class EpisodeStart:
    """How to bring another environment of the same make to where one is, by repeating its episode."""

    repeat: Callable[[Env], Any]
    """Repeats it and returns the last observation; CannotSave if that led elsewhere."""
    nbytes: int


FindStart = Callable[[], EpisodeStart | None]
"""How a live environment came to where it is; None where that is not known."""


class CannotSave(Exception):
    """The state of this environment cannot be kept, or what was given is no state of it."""


class StateKeeper(ABC):
    """Keeps states of environments of one make.

    Environments that states are loaded into are of the same make as those they were saved from, and have been reset.
    `level` is one of `snapshot.states.Level`; `capabilities` are what HELLO says of it.
    """

    level: int
    exact = True
    """Whether an environment continues from a loaded state exactly as it would have continued, bit for bit."""
    capabilities: tuple[str, ...] = ()
    is_random = False
    """Whether steps are known to be random, whatever `rng_state` shows."""
    players = 1
    """With 2, the environments have `to_play` and `view()`, which returns the observation and the legal moves."""

    @abstractmethod
    def save(self, env: Env, find_start: FindStart | None = None) -> Any:
        """The state, as a value that does not change with the environment, which stays as it is.

        `find_start` is given for a live environment, which others step; without it, states were loaded into `env`.
        """

    @abstractmethod
    def load(self, env: Env, kept: Any) -> None:
        """Bring an environment into a state, random generators included."""

    @abstractmethod
    def reseed(self, env: Env, seed: int) -> None:
        """Give an environment other random numbers than its state has; the same seed gives the same ones."""

    @abstractmethod
    def rng_state(self, env: Env) -> Any:
        """The state of the random generators of an environment that was loaded; `==` tells whether they were used."""

    @abstractmethod
    def nbytes(self, kept: Any) -> int:
        """Memory that a state takes."""

    def step(self, env: Env, action: Any) -> Any:
        """Step an environment that a state was loaded into."""
        return env.step(action)

    def release(self, env: Env) -> None:  # noqa: B027 - most need not know
        """From now on others step this environment, which a state was loaded into."""

    def drop(self, kept: Any) -> None:  # noqa: B027 - Python frees it
        """A state is no longer needed."""
