"""A game of two players who move in turn, as functions of many positions at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from gymnasium import spaces

from corral.core.types import Array, EnvSpec, Tree
from corral.snapshot.array_states import ArrayStates
from corral.snapshot.live_env import LiveEnv

if TYPE_CHECKING:
    from corral.envs.suites.games.players import Player


@dataclass(frozen=True)
class Game:
    """The rules of a game, an `ArrayModel`: positions are rows of int64, all zeros before the first move."""

    name: str
    width: int  # numbers in a position
    actions: int
    shape: tuple[int, ...]  # of an observation, from the view of the player to move
    longest: int  # maximum number of moves
    play: Callable[[Array, Array, Array, Array, Array], None]
    """(states, rows, actions, reward, over): make legal moves in these rows; the reward is the mover's."""
    observe: Callable[[Array, Array, Array, Array], None]
    """(states, rows, obs, legal): what the player to move sees in these rows, and which moves are legal."""
    row_0_below: bool = False  # whether the first row of an observation is drawn at the bottom
    accuracy: Callable[[Player], tuple[float, int]] | None = None
    """The fraction of a player's moves that are correct in positions with known best moves, and their number."""

    players: ClassVar[int] = 2
    stochastic: ClassVar[bool] = False
    finite: ClassVar[bool] = True
    dtype: ClassVar[type] = np.int64

    @property
    def observation_space(self) -> spaces.Box:
        return spaces.Box(0.0, 1.0, self.shape, np.float32)

    @property
    def action_space(self) -> spaces.Discrete:
        return spaces.Discrete(self.actions)

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(self.observation_space, self.action_space, self.name)

    def states(self, envs: Sequence[LiveEnv] = (), memory_mb: float = 1024.0) -> ArrayStates:
        return ArrayStates(self, self.spec, envs, memory_mb)

    def start(self, count: int) -> Array:
        return np.zeros((count, self.width), np.int64)

    def look(self, states: Array) -> tuple[Array, Array]:
        obs, legal = np.zeros((len(states), *self.shape), np.float32), np.zeros((len(states), self.actions), np.bool_)
        self.observe(states, np.arange(len(states)), obs, legal)
        return obs, legal

    def move(self, states: Array, actions: Array) -> tuple[Array, Array]:
        """Make legal moves in place; returns the movers' rewards, and which games are over."""
        reward, over = np.zeros(len(states)), np.zeros(len(states), np.bool_)
        self.play(states, np.arange(len(states)), np.asarray(actions), reward, over)
        return reward, over

    def step(self, rows: Array, actions: Tree, seeds: Array | None = None) -> tuple[Array, Array, Array]:
        reward, over = self.move(rows, actions)
        return reward, over, np.zeros(len(rows), np.bool_)
