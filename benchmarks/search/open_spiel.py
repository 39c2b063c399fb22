"""OpenSpiel's MCTS as engines of `python -m benchmarks search`: in Python, and in C++ with random rollouts."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import numpy as np
import pyspiel
from open_spiel.python.algorithms import mcts

from benchmarks.search.engine import Work
from benchmarks.search.task import C_INIT, COLUMNS, Array, Problem, SearchTask
from corral.core.errors import UserError

_MEMORY_MB = 1000


class OpenSpiel:
    """Its Python search: one tree at a time, and one position per evaluation."""

    version = metadata.version("open_spiel")
    node_bytes: float | None = None

    def __init__(self, problem: Problem):
        self._problem, self._game = problem, pyspiel.load_game("connect_four")
        self.states = [self._game.new_initial_state() for _ in problem.prefixes]
        for state, played in zip(self.states, problem.prefixes, strict=True):
            for column in played:
                state.apply_action(column)

    def perft(self, depth: int) -> list[int]:
        counts = [0] * depth

        def count(state: Any, at: int) -> None:
            for action in state.legal_actions():
                counts[at] += 1
                if at + 1 < depth:
                    after = state.child(action)
                    if not after.is_terminal():
                        count(after, at + 1)

        count(self._game.new_initial_state(), 0)
        return counts

    def outputs(self) -> Array:
        """With its own observations, from the view of the player to move."""
        return self._problem.outputs(np.stack([planes_of(state) for state in self.states]))

    def prepare(self, task: SearchTask) -> OpenSpielSearcher:
        evaluator = _Evaluator(self._problem, task.evaluator == "network")
        bot = mcts.MCTSBot(
            self._game, C_INIT, task.sims, evaluator, solve=False, random_state=np.random.RandomState(0),
            child_selection_fn=mcts.SearchNode.puct_value,
        )  # fmt: skip
        return OpenSpielSearcher(self.states, bot, evaluator.work)


class OpenSpielCpp(OpenSpiel):
    """Its C++ search, whose only evaluator is a random rollout."""

    def prepare(self, task: SearchTask) -> OpenSpielSearcher:
        if task.evaluator != "rollouts":
            raise UserError("OpenSpiel's C++ search evaluates leaves by random rollouts only.")
        evaluator = pyspiel.RandomRolloutEvaluator(n_rollouts=1, seed=0)
        bot = pyspiel.MCTSBot(self._game, evaluator, C_INIT, task.sims, _MEMORY_MB, False, 0, False)
        return OpenSpielSearcher(self.states, bot, Work(0, 0, None))


class OpenSpielSearcher:
    """A bot that searches one position after the other."""

    def __init__(self, states: Any, bot: Any, work: Work):
        self._states, self._bot, self.work = states, bot, work

    def decide(self, rows: Array) -> Array:
        return np.array([self._bot.step(self._states[row]) for row in rows.tolist()])


class _Evaluator(mcts.Evaluator):  # type: ignore[misc]
    """Values for both players and priors, like its `AlphaZeroEvaluator`, but without a cache."""

    def __init__(self, problem: Problem, network: bool):
        self._problem, self._network, self.work = problem, network, Work(0, 0, None)

    def evaluate(self, state: Any) -> Array:
        """Called for a leaf; `prior` is called when it is expanded."""
        value = float(self._outputs(state)[COLUMNS]) if self._network else 0.0
        return np.array([value, -value] if state.current_player() == 0 else [-value, value])

    def prior(self, state: Any) -> list[tuple[int, float]]:
        legal = state.legal_actions()
        if not self._network:
            return [(action, 1.0 / len(legal)) for action in legal]
        weights = np.exp(self._outputs(state)[legal])
        return list(zip(legal, (weights / weights.sum()).tolist(), strict=True))

    def _outputs(self, state: Any) -> Array:
        assert self.work.network_calls is not None
        assert self.work.network_rows is not None
        self.work.network_calls += 1
        self.work.network_rows += 1
        row: Array = self._problem.outputs(planes_of(state)[None])[0]
        return row


def planes_of(state: Any) -> Array:
    """Planes of own and other stones, bottom row first."""
    planes = np.array(state.observation_tensor(0), np.float32).reshape(3, 6, 7)  # player 0's, 1's, and empty ones
    return planes[[0, 1]] if state.current_player() == 0 else planes[[1, 0]]
