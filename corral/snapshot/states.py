"""The state contract: states of environments by number, stepped from without touching the environment itself.

A planner saves the state that an environment is in, steps from it to states that exist only here, and drops them. The
environment that acts is never stepped, and after any amount of planning it is what it was, bit by bit.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from corral.core.errors import EnvFailed
from corral.core.types import Array, EnvSpec, Tree


class Level(IntEnum):
    """What can be done with the states of an environment; each level can do what those below it can."""

    NONE = 0
    REPLAY = 1  # brought back by repeating every action since the episode began
    MEMORY = 2  # kept in memory
    CONCURRENT = 3  # expanded on several threads at once
    PORTABLE = 4  # bytes that another process or machine can go on from


@dataclass(slots=True)
class Views:
    """What is seen in states, one row each."""

    obs: Tree  # [B, ...]
    legal: Array | None  # [B, actions] bool; None: every action is
    to_play: Array  # [B] int8, who acts: 0, or 0 and 1 where two do


@dataclass(slots=True)
class Expansion:
    """What came of stepping from states: row i led to the state `children[i]`.

    A child whose episode has ended is seen but cannot be stepped from. A terminated one is worth nothing to come, a
    truncated one what a value function says of its observation. A step that failed is no step: truncated, with the
    parent's observation and without reward, and nobody knows what would have come of it.
    """

    children: Array  # [B] int64
    obs: Tree  # [B, ...]
    reward: Array  # [B] float64, of who acted
    terminated: Array  # [B] bool
    truncated: Array  # [B] bool
    legal: Array | None  # [B, actions] bool; None: every action is
    to_play: Array  # [B] int8
    faulty: Array | None = None  # [B] bool, steps that failed; None: no step did


@dataclass(slots=True)
class Rollouts:
    """What came of several steps from each state, without keeping any; an episode that ends, ends its row.

    A step that fails ends its row, truncated, at the last good observation or an earlier one.
    """

    reward: Array  # [B, T] float64, 0 after the end
    length: Array  # [B] int64, steps that were made
    obs: Tree  # [B, ...], the last
    terminated: Array  # [B] bool
    truncated: Array  # [B] bool
    faulty: Array | None = None  # [B] bool, rows that a failed step has ended; None: no step failed


class States(ABC):
    """States of the environments that `save` names by their place: 0 of a single one, or the env ids of a VecEnv.

    Ids are whole numbers above 0 that `new_ids` gives out. What can be kept is bounded; `save` and `expand` raise
    UserError when it is full. Rows of a call do not depend on each other.
    """

    spec: EnvSpec
    level: Level
    players: int = 1
    stochastic: bool = False
    """Whether steps have been seen to throw dice: the same action may then lead elsewhere."""

    @abstractmethod
    def new_ids(self, count: int) -> Array:
        """Ids that no state has, [count] int64."""

    @abstractmethod
    def save(self, env_ids: Array) -> Array:
        """Keep the states that these environments are in; returns ids."""

    @abstractmethod
    def load(self, ids: Array, env_ids: Array) -> Views:
        """Put these environments into these states, generators included; the states stay."""

    @abstractmethod
    def look(self, ids: Array) -> Views:
        """What is seen in states."""

    @abstractmethod
    def drop(self, ids: Array) -> None:
        """Forget states; ids that nothing has are passed over."""

    @abstractmethod
    def expand(self, parents: Array, actions: Tree, children: Array, seeds: Array | None = None) -> Expansion:
        """Step from `parents` ([B, ...] actions as the environment takes them), keep what comes out as `children`.

        Dice are those of the parent's state, so that what comes out is what the environment would do; or, where there
        are `seeds` ([B] uint64), others, which a planner wants: it must not know what the real dice will show.
        """

    @abstractmethod
    def rollout(self, parents: Array, actions: Tree, seeds: Array | None = None) -> Rollouts:
        """Make T steps from each of `parents` with actions [B, T, ...]; nothing is kept."""

    @abstractmethod
    def close(self) -> None:
        """Forget everything, and end what belongs to it."""


def turns(count: int) -> Array:
    """`to_play` where one player acts."""
    return np.zeros(count, np.int8)


# Steps of planners that fail: each ends its own branch, and only a planner whose steps all fail ends the run. So it
# is where environments act, too: a failure costs an episode there, and here what a search would have found beyond.


log = logging.getLogger("corral.planning")

_MAX_IN_A_ROW = 1000


class FailedSteps:
    """Counts failed steps, says the first, the tenth, the hundredth, ..., and gives up when there is nothing else."""

    def __init__(self, name: str):
        self._name, self.count, self._in_a_row = name, 0, 0

    def note(self, failed: Array, words: str) -> Array | None:
        """Take in which rows of a call failed, and what was said of one; returns `failed`, or None if none did."""
        number = int(failed.sum())
        if not number:
            self._in_a_row = 0
            return None
        before, self.count = self.count, self.count + number
        self._in_a_row = self._in_a_row + number if number == len(failed) else 0
        if self._in_a_row >= _MAX_IN_A_ROW:
            raise EnvFailed(
                f"{self._in_a_row:,} steps of a planner's {self._name} have failed in a row; run `corral check-env` on "
                f"it. Last: {words}"
            )
        if len(str(before)) < len(str(self.count)) or not before:
            log.warning(
                "A planner's %s has failed in %d step%s, each the end of its branch; the search goes on. Last: %s",
                self._name, self.count, "s" * (self.count > 1), words,
            )  # fmt: skip
        return failed
