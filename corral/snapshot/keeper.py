"""`StateKeeper`: how the state of one environment is saved and restored, for planners and for simulators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium

Env = gymnasium.Env[Any, Any]


@dataclass(frozen=True)
class EpisodeStart:
    """A recorded episode that can be replayed to bring another instance to the same state."""

    repeat: Callable[[Env], Any]
    """Repeats it and returns the last observation; CannotSave if the result differs."""
    nbytes: int


FindStart = Callable[[], EpisodeStart | None]
"""How a live environment reached its state; None if unknown."""


class CannotSave(Exception):
    """The state of this environment cannot be kept, or the given value is not a state of it."""


class StateKeeper(ABC):
    """Keeps states of environments of one kind. States are loaded into environments of the same kind as they were saved
    from, which have been reset. `level` is one of `snapshot.states.Level`; `capabilities` are those announced in HELLO.
    """

    level: int
    exact = True  # whether an environment continues from a loaded state bit for bit
    capabilities: tuple[str, ...] = ()
    is_random = False  # whether steps are known to be random, regardless of `rng_state`
    foreseen = ""  # a sentence, if planners would foresee random numbers because nothing reseeds them
    players = 1
    """With 2, the environments have `to_play` and `view()`, which returns the observation and the legal moves."""

    @abstractmethod
    def save(self, env: Env, find_start: FindStart | None = None) -> Any:
        """The state, as a value independent of the environment, which is unchanged. `find_start` is given for a live
        environment, which its owner steps; without it, states were loaded into `env`.
        """

    @abstractmethod
    def load(self, env: Env, kept: Any) -> None: ...

    @abstractmethod
    def reseed(self, env: Env, seed: int) -> None:
        """Replace an environment's random numbers by those of `seed`."""

    @abstractmethod
    def rng_state(self, env: Env) -> Any:
        """The state of the RNGs of a loaded environment; `==` tells whether they were used."""

    @abstractmethod
    def nbytes(self, kept: Any) -> int: ...

    def step(self, env: Env, action: Any) -> Any:
        return env.step(action)

    def release(self, env: Env) -> None:  # noqa: B027 - most need not know
        """Called when an environment with a loaded state is handed over to its owner."""

    def drop(self, kept: Any) -> None:  # noqa: B027 - Python frees it
        """Called when a state is no longer needed."""
