"""Matches between players of a game: all boards at once, colours swapped, no opening twice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array
from corral.envs.suites.games.game import Game
from corral.envs.suites.games.players import Player, Random

_TRIES = 50
_Z = 1.96  # for a 95 % confidence interval


@dataclass(frozen=True)
class Match:
    """Results of games between two players, from the view of the first."""

    wins: int
    draws: int
    losses: int
    began: tuple[int, int, int]  # wins, draws and losses of the games that the first player began
    different: int  # number of distinct games

    @property
    def games(self) -> int:
        return self.wins + self.draws + self.losses

    @property
    def score(self) -> float:
        """Mean points per game; a draw counts half."""
        return (self.wins + 0.5 * self.draws) / self.games

    @property
    def elo(self) -> float:
        """Elo advantage of the first player; infinite if one player scored all points."""
        return _elo(self.score)

    @property
    def elo_interval(self) -> tuple[float, float]:
        """95 % confidence interval of `elo`, by Wilson's interval, which is conservative with draws."""
        n, p = self.games, self.score
        centre, half = p + _Z**2 / (2 * n), _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
        low, high = ((centre + side * half) / (1 + _Z**2 / n) for side in (-1, 1))
        return _elo(low), _elo(high)

    def __str__(self) -> str:
        low, high = (f"{elo:+.0f}" for elo in self.elo_interval)
        return f"{self.wins} won, {self.draws} drawn, {self.losses} lost; Elo {self.elo:+.0f} ({low} to {high})"


def play_match(game: Game, one: Player, other: Player, games: int, rng: np.random.Generator, opening: int = 4) -> Match:
    """Play a match; each player begins half of the games.

    Deterministic players would repeat one game. Therefore each pair of games, one begun by either player, starts after
    `opening` random moves, and no two pairs start from the same position. With opening=0 the players must vary their
    moves themselves; `Match.different` counts the distinct games.
    """
    if games < 2 or games % 2:
        raise UserError(f"A match needs an even number of games, so that each player begins half of them, got {games}.")
    positions = np.repeat(openings(game, games // 2, opening, rng), 2, axis=0)
    one_began = np.arange(games) % 2 == 0
    result, sequences = np.zeros(games), np.full((games, game.longest), -1, np.int16)
    alive, ones_turn = np.ones(games, np.bool_), one_began ^ bool(opening % 2)
    for ply in range(game.longest):
        for player, is_one in ((one, True), (other, False)):
            rows = np.flatnonzero(alive & (ones_turn == is_one))
            if len(rows):
                boards = positions[rows]
                moves = _checked(game, player, boards, rng)
                reward, over = game.move(boards, moves)
                positions[rows], sequences[rows, ply] = boards, moves
                result[rows] += reward if is_one else -reward
                alive[rows[over]] = False
        ones_turn = ~ones_turn
        if not alive.any():
            break
    starts = np.repeat(np.arange(games // 2) if opening else np.zeros(games // 2, np.int64), 2)
    named = np.column_stack([starts, one_began, sequences])
    return Match(*_tally(result), _tally(result[one_began]), len(np.unique(named, axis=0)))


def openings(game: Game, count: int, plies: int, rng: np.random.Generator) -> Array:
    """Distinct unfinished positions after `plies` random moves; all equal if `plies` is 0."""
    if plies == 0:
        return game.start(count)
    found: dict[bytes, Array] = {}
    for _ in range(_TRIES):
        states, live = game.start(count), np.ones(count, np.bool_)
        for _ in range(plies):
            boards = states[live]
            _, over = game.move(boards, Random(game)(boards, rng))
            states[live] = boards
            live[np.flatnonzero(live)[over]] = False
        found.update((row.tobytes(), row) for row in states[live])
        if len(found) >= count:
            return np.array(list(found.values())[:count])
    raise UserError(
        f"{game.name} has too few positions after {plies} moves for {count} different openings: play fewer games, or "
        "use a longer opening."
    )


def _checked(game: Game, player: Player, boards: Array, rng: np.random.Generator) -> Array:
    moves = np.asarray(player(boards.copy(), rng))
    _, legal = game.look(boards)
    if moves.shape != (len(boards),) or not legal[np.arange(len(boards)), moves].all():
        name = getattr(player, "__name__", type(player).__name__)
        raise UserError(f"{name} makes moves that are illegal in {game.name}: return one legal move for each position.")
    return moves


def _tally(results: Array) -> tuple[int, int, int]:
    return int(np.sum(results > 0)), int(np.sum(results == 0)), int(np.sum(results < 0))


def _elo(score: float) -> float:
    if score <= 0 or score >= 1:
        return math.copysign(math.inf, score - 0.5)
    return 400 * math.log10(score / (1 - score))
