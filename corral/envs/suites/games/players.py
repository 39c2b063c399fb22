"""Who plays: a function of positions, for many boards at once."""

from __future__ import annotations

import importlib
from typing import Protocol

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array
from corral.envs.suites.games.game import Game


class Player(Protocol):
    """Decides for who is to move. All chance is drawn from `rng`, so that games can be repeated."""

    def __call__(self, positions: Array, rng: np.random.Generator) -> Array:
        """Legal moves [n] in positions [n, words], none of which is over."""


class Random:
    """Any legal move."""

    def __init__(self, game: Game):
        self._game = game

    def __call__(self, positions: Array, rng: np.random.Generator) -> Array:
        """Each as likely as the others."""
        _, legal = self._game.look(positions)
        moves: Array = np.argmax(legal * (1.0 - rng.random(legal.shape)), axis=1)
        return moves


def make_player(game: Game, player: str | Player) -> Player:
    """A player, or one by name.

    `random`; `mcts:1000`, a search by random games with so many simulations; `perfect`; or `module:name` of a function
    that takes the game and returns a Player.
    """
    if not isinstance(player, str):
        return player
    if player == "random":
        return Random(game)
    if player == "perfect":
        from corral.envs.suites.games.perfect import perfect

        return perfect(game)
    kind, _, rest = player.partition(":")
    if kind == "mcts" and rest.isdecimal():
        from corral.envs.suites.games.rollout_mcts import RolloutMcts

        return RolloutMcts(game, int(rest))
    if kind and rest.isidentifier():
        return _by_name(game, kind, rest)
    raise UserError(f"{player!r} is no player: choose random, mcts:1000, perfect, or module:name of your own.")


def _by_name(game: Game, module: str, name: str) -> Player:
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"The player {module}:{name} cannot be imported ({error}): check its name and path.") from error
    player: Player = make(game)
    return player
