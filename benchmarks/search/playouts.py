"""Leaf values by random games to their end."""

from __future__ import annotations

import numpy as np

from corral.core.types import Array, Tree
from corral.envs.suites.games.game import Game
from corral.planning.mcts.evaluation import LeafValues, uniform
from corral.snapshot.array_states import ArrayStates


class RandomPlayouts:
    """Uniform priors, and the result of random games: `RolloutEvaluation` to the end, three times as fast."""

    def __init__(self, states: ArrayStates, seed: int):
        assert isinstance(states.model, Game)
        self._game, self._states, self._rng = states.model, states, np.random.default_rng(seed)

    def __call__(self, obs: Tree, legal: Array, ids: Array) -> LeafValues:
        results, sign = np.zeros(len(ids)), 1.0
        rows = np.flatnonzero(ids > 0)
        boards = self._states.rows[ids[rows]]
        while len(rows):
            _, can = self._game.look(boards)
            reward, over = self._game.move(boards, np.argmax(can * self._rng.random(can.shape), axis=1))
            results[rows] += sign * reward
            rows, boards, sign = rows[~over], boards[~over], -sign
        return LeafValues(uniform(legal), results.astype(np.float32))
