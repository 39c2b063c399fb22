"""States of a game, by row: the cheapest that can be, a copy of some words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from corral.envs.suites.games.game import Game
from corral.types import Array, Tree


@dataclass
class Steps:
    """What came of stepping from states, and what is seen there."""

    obs: Tree  # [B, ...]
    legal: Array  # [B, actions] bool
    reward: Array  # [B] float64, of who moved
    over: Array  # [B] bool, the episode ends here


class GameStates:
    """Positions of a game; an id is a row."""

    def __init__(self, game: Game, count: int):
        self.game, self.rows = game, game.start(count)

    def put(self, ids: Array, positions: Array) -> tuple[Tree, Array]:
        """Write positions; what is seen there, and what is legal."""
        self.rows[ids] = positions
        return self.game.look(np.ascontiguousarray(positions))

    def expand(self, parents: Array, actions: Array, children: Array) -> Steps:
        """Step from `parents`, keep what comes out as `children`. Actions must be legal."""
        game, batch = self.game, len(parents)
        self.rows[children] = self.rows[parents]
        reward, over = np.zeros(batch), np.zeros(batch, np.bool_)
        game.play(self.rows, children, actions, reward, over)
        obs, legal = np.zeros((batch, *game.shape), np.float32), np.zeros((batch, game.actions), np.bool_)
        game.observe(self.rows, children, obs, legal)
        return Steps(obs, legal, reward, over)
