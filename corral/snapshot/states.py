"""`States`: states of environments by id, and steps from them that do not touch the environments themselves.

A planner saves the state of an environment, steps from it to states that exist only here, and drops them. The live
environment is never stepped: after any amount of planning it is unchanged, bit for bit.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum

from corral.core.errors import EnvFailed, UserError
from corral.core.types import Array, EnvSpec, Tree

log = logging.getLogger("corral.planning")

_MAX_IN_A_ROW = 1000


class StatesFull(UserError):
    """Raised when the limit of memory or states is reached; the call has no effect, and no state is evicted."""


class UnknownState(UserError):
    """There is no state with this id."""


class EpisodeEnded(UserError):
    """A state is the end of its episode, so no step from it is possible."""


class Level(IntEnum):
    """What can be done with the states of an environment; each level includes those below it."""

    NONE = 0
    REPLAY = 1  # restored by repeating every action since the episode began
    MEMORY = 2  # kept in memory
    CONCURRENT = 3  # expanded on several threads at once
    PORTABLE = 4  # bytes that another process or machine can continue from


@dataclass(slots=True)
class Views:
    """Observations of states, one row each."""

    obs: Tree  # [B, ...]
    legal: Array | None  # [B, actions] bool; None: every action is legal
    to_play: Array  # [B] int8, the player to move: 0, or 0 and 1 in games of two players


@dataclass(slots=True)
class Expansion:
    """Results of one step from each state: row i led to the state `children[i]`.

    A child whose episode has ended has an observation, but no step from it is possible. A terminated one has value 0, a
    truncated one is bootstrapped from its observation. A failed step is a truncated row with the parent's observation
    and reward 0.
    """

    children: Array  # [B] int64
    obs: Tree  # [B, ...]
    reward: Array  # [B] float64, of the player who moved
    terminated: Array  # [B] bool
    truncated: Array  # [B] bool
    legal: Array | None  # [B, actions] bool; None: every action is legal
    to_play: Array  # [B] int8
    faulty: Array | None = None  # [B] bool, steps that failed; None: no step did


@dataclass(slots=True)
class Rollouts:
    """Results of several steps from each state; no state is kept, and the end of an episode ends its row. A failed step
    ends its row as truncated, at the last good observation or an earlier one.
    """

    reward: Array  # [B, T] float64, 0 after the end
    length: Array  # [B] int64, number of steps
    obs: Tree  # [B, ...], the last
    terminated: Array  # [B] bool
    truncated: Array  # [B] bool
    faulty: Array | None = None  # [B] bool, rows that ended by a failed step; None: no step failed


class States(ABC):
    """States of some environments, which `save` and `load` identify by their index: the env ids of a VecEnv, or 0.

    Ids are positive integers from `new_ids`. Memory is bounded: `save` and `expand` raise UserError when it is full.
    The rows of a call are independent of each other.
    """

    spec: EnvSpec
    level: Level
    players: int = 1
    stochastic: bool = False  # whether steps were seen to draw random numbers

    @abstractmethod
    def new_ids(self, count: int) -> Array: ...

    @abstractmethod
    def save(self, env_ids: Array) -> Array:
        """Save the states of these environments; returns their ids."""

    @abstractmethod
    def load(self, ids: Array, env_ids: Array) -> Views:
        """Bring these environments into these states, RNGs included; the states stay."""

    @abstractmethod
    def look(self, ids: Array) -> Views:
        """Observations, legal actions and player to move of states."""

    @abstractmethod
    def drop(self, ids: Array) -> None:
        """Drop states; unused ids are ignored."""

    @abstractmethod
    def expand(self, parents: Array, actions: Tree, children: Array, seeds: Array | None = None) -> Expansion:
        """Make one step from each of `parents` with actions [B, ...], and keep the resulting states as `children`.

        Without `seeds` ([B] uint64) the random numbers are those of the parent's state, so the result is what the
        environment would do. A planner passes seeds, because it must not know the environment's random numbers.
        """

    @abstractmethod
    def rollout(self, parents: Array, actions: Tree, seeds: Array | None = None) -> Rollouts:
        """Make T steps from each of `parents` with actions [B, T, ...]; no state is kept."""

    @abstractmethod
    def close(self) -> None:
        """Drop all states, and close the environments made for them."""


class FailedSteps:
    """Counts and logs a planner's failed steps, each of which ends a branch; EnvFailed after 1,000 in a row."""

    def __init__(self, name: str):
        self._name, self.count, self._in_a_row = name, 0, 0

    def note(self, failed: Array, message: str) -> Array | None:
        """Count the failed rows of a call; `message` is of one of them. Returns `failed`, or None if no row failed."""
        number = int(failed.sum())
        if not number:
            self._in_a_row = 0
            return None
        before, self.count = self.count, self.count + number
        self._in_a_row = self._in_a_row + number if number == len(failed) else 0
        if self._in_a_row >= _MAX_IN_A_ROW:
            raise EnvFailed(
                f"{self._in_a_row:,} planning steps of {self._name} failed in a row; run `corral check-env` on it. "
                f"Last: {message}"
            )
        if len(str(before)) < len(str(self.count)) or not before:
            log.warning(
                "%d planning step%s of %s failed; each ended its branch, and the search continues. Last: %s",
                self.count, "s" * (self.count > 1), self._name, message,
            )  # fmt: skip
        return failed
