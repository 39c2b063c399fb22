"""Players: functions of positions, for many boards at once."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from corral.core.errors import UserError
from corral.core.imports import import_named
from corral.core.types import Array
from corral.envs.suites.games.connect4 import CONNECT4
from corral.envs.suites.games.connect4_solver import ILLEGAL, UNKNOWN, Connect4Solver
from corral.envs.suites.games.game import Game
from corral.envs.suites.games.rollout_mcts import RolloutMcts
from corral.envs.suites.games.tictactoe import TICTACTOE, best_moves


class Player(Protocol):
    """Chooses moves for the player to move. All randomness comes from `rng`, so that games are reproducible."""

    def __call__(self, positions: Array, rng: np.random.Generator) -> Array:
        """Legal moves [n] in positions [n, width] whose games are not over."""


class Random:
    """Any legal move."""

    def __init__(self, game: Game):
        self._game = game

    def __call__(self, positions: Array, rng: np.random.Generator) -> Array:
        _, legal = self._game.look(positions)
        moves: Array = np.argmax(legal * (1.0 - rng.random(legal.shape)), axis=1)
        return moves


def make_player(game: Game, player: str | Player) -> Player:
    """A player, or one by name: `random`; `mcts:1000`, a search by random games with that many simulations; `perfect`;
    or `module:name` of a function that takes the game and returns a Player.
    """
    if not isinstance(player, str):
        return player
    if player == "random":
        return Random(game)
    if player == "perfect":
        return perfect(game)
    kind, _, rest = player.partition(":")
    if kind == "mcts" and rest.isdecimal():
        return RolloutMcts(game, int(rest))
    if kind and rest.isidentifier():
        return _by_name(game, kind, rest)
    raise UserError(f"{player!r} is not a player: choose random, mcts:1000, perfect, or your own module:name.")


def _by_name(game: Game, module: str, name: str) -> Player:
    try:
        make = getattr(import_named(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"The player {module}:{name} cannot be imported ({error}): check its name and path.") from error
    player: Player = make(game)
    return player


_BUDGET, _SIMS = 2_000_000, 10_000


def perfect(game: Game) -> Player:
    """The perfect player of a game."""
    if game == TICTACTOE:
        return perfect_tictactoe
    if game == CONNECT4:
        return PerfectConnect4()
    raise UserError(f"There is no perfect player of {game.name}: use mcts:1000, or your own Player.")


def perfect_tictactoe(positions: Array, rng: np.random.Generator) -> Array:
    """Any move that keeps the value of the position."""
    return np.array([rng.choice(best_moves(own, every)) for own, every in positions.tolist()])


class PerfectConnect4:
    """Wins as early as possible, and loses as late as possible. It is exact if the solver needs at most `budget`
    positions, nearly always from 16 stones on. Before that, it excludes moves known to be worse than another, and plays
    what a search by random games prefers among the rest.
    """

    def __init__(self, budget: int = _BUDGET, sims: int = _SIMS):
        self._solver, self._search, self._budget = Connect4Solver(), RolloutMcts(CONNECT4, sims), budget

    def __call__(self, positions: Array, rng: np.random.Generator) -> Array:
        return np.array([self._decide(position[None], rng) for position in positions])

    def _decide(self, position: Array, rng: np.random.Generator) -> int:
        good = promising(self._solver.values(position, self._budget)[0])
        if len(good) > 1:
            scores = self._solver.scores(position, self._budget)[0, good]
            if not (scores == UNKNOWN).any():
                return int(rng.choice(good[scores == scores.max()]))
            visits = self._search.visits(position, rng)[0, good]
            return int(good[visits.argmax()])
        return int(good[0])


def promising(values: Array) -> Array:
    """Moves not known to be worse than another; losing ones only if all lose."""
    unknown = values == UNKNOWN
    best = values[~unknown & (values != ILLEGAL)].max(initial=-1)
    if best == 1 or not unknown.any():
        return np.flatnonzero(values == best)
    return np.flatnonzero(unknown | (values == 0))
