"""A game of two players who move in turn, as functions on many positions at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from corral.core.types import Array


@dataclass(frozen=True)
class Game:
    """Positions are rows of words; a game begins with zeros. Actions are numbers, of which some are legal."""

    name: str
    words: int
    actions: int
    shape: tuple[int, ...]
    """Of an observation, from the view of who is to move."""
    longest: int
    """Moves, at most."""
    play: Callable[[Array, Array, Array, Array, Array], None]
    """(states, rows, actions, reward, over): make legal moves in these rows; the reward is the mover's."""
    observe: Callable[[Array, Array, Array, Array], None]
    """(states, rows, obs, legal): what who is to move sees in these rows, and may do."""
    row_0_below: bool = False
    """How the planes of an observation are to be drawn."""

    @property
    def observation_space(self) -> spaces.Box:
        """Planes of zeros and ones."""
        return spaces.Box(0.0, 1.0, self.shape, np.float32)

    @property
    def action_space(self) -> spaces.Discrete:
        """Numbers of moves."""
        return spaces.Discrete(self.actions)

    def start(self, count: int) -> Array:
        """Positions before the first move."""
        return np.zeros((count, self.words), np.int64)

    def look(self, states: Array) -> tuple[Array, Array]:
        """Observations and legal actions of positions."""
        obs, legal = np.zeros((len(states), *self.shape), np.float32), np.zeros((len(states), self.actions), np.bool_)
        self.observe(states, np.arange(len(states)), obs, legal)
        return obs, legal

    def move(self, states: Array, actions: Array) -> tuple[Array, Array]:
        """Make legal moves in place; rewards of the movers, and which games are over."""
        reward, over = np.zeros(len(states)), np.zeros(len(states), np.bool_)
        self.play(states, np.arange(len(states)), np.asarray(actions), reward, over)
        return reward, over
