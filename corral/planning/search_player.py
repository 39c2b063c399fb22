"""A tree search as a player of board games."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from corral.core.types import Array
from corral.envs.suites.games.game import Game
from corral.planning.action_set import ActionSet, Choices
from corral.planning.config import SearchConfig
from corral.planning.mcts.evaluation import Evaluate
from corral.planning.planner import Planner
from corral.snapshot.states import States

MakeEvaluation = Callable[[States, ActionSet], Evaluate]


class SearchPlayer:
    """A search as a player, with a tree for each of up to `boards` positions; `noise` 0 plays best."""

    def __init__(
        self,
        game: Game,
        make_evaluation: MakeEvaluation,
        sims: int,
        config: SearchConfig,
        boards: int = 128,
        noise: float = 0.0,
    ):
        self._boards, self._rng, self._noise = boards, np.random.default_rng(0), noise
        self._states = states = game.states()
        actions = Choices(states.spec.action)
        self._planner = Planner(
            states, actions, make_evaluation(states, actions), config, boards, sims, discount=1.0, rng=self._rng
        )

    def __call__(self, positions: Array, rng: np.random.Generator) -> Array:
        self._rng.bit_generator.state = np.random.PCG64(int(rng.integers(2**63))).state
        size = self._boards
        return np.concatenate([self._plan(positions[at : at + size]) for at in range(0, len(positions), size)])

    def _plan(self, positions: Array) -> Array:
        trees, roots = np.arange(len(positions)), self._states.put(positions)
        return self._planner.plan(trees, np.ones(len(trees), np.bool_), noise=self._noise, roots=roots).best
