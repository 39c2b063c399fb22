"""A search as a player of games: one tree for each board."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from corral.core.types import Array
from corral.envs.suites.games.game import Game
from corral.planning.action_set import ActionSet, Choices
from corral.planning.game_states import GameStates
from corral.planning.mcts.evaluation import Evaluate
from corral.planning.planner import Planner, SearchConfig
from corral.snapshot.states import States

MakeEvaluation = Callable[[States, ActionSet], Evaluate]


@dataclass
class _Board:
    position: Array
    to_play: int = 0
    over: bool = False


class SearchPlayer:
    """Searches up to `boards` positions at once, more in turn. `noise` as planners have it: 0 plays as well as it can.

    `make_evaluation` is asked once, for what evaluates the leaves.
    """

    def __init__(
        self,
        game: Game,
        make_evaluation: MakeEvaluation,
        sims: int,
        config: SearchConfig,
        boards: int = 128,
        noise: float = 0.0,
    ):
        self._boards = [_Board(game.start(1)[0]) for _ in range(boards)]
        self._rng, self._noise = np.random.default_rng(0), noise
        states = GameStates(game, self._boards)
        actions = Choices(states.spec.action)
        self._planner = Planner(
            states, actions, make_evaluation(states, actions), config, boards, sims, discount=1.0, rng=self._rng
        )

    def __call__(self, positions: Array, rng: np.random.Generator) -> Array:
        """What the searches would do."""
        self._rng.bit_generator.state = np.random.PCG64(int(rng.integers(2**63))).state
        size = len(self._boards)
        return np.concatenate([self._plan(positions[at : at + size]) for at in range(0, len(positions), size)])

    def _plan(self, positions: Array) -> Array:
        for board, position in zip(self._boards, positions, strict=False):
            board.position = position
        rows = np.arange(len(positions))
        return self._planner.plan(rows, np.ones(len(rows), np.bool_), noise=self._noise).best
