"""UCT with random rollouts, for one position at a time, fully compiled.

It knows only the rules, so it serves as a yardstick: an opponent of known strength for any number of simulations. A
simulation follows the edges with the greatest q + c sqrt(log N / n) (Kocsis and Szepesvári 2006), unvisited edges first
and in order, adds the position it reaches, plays a random game from there, and adds the result to every edge on the
path, from the view of the player who moved.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from corral.core.errors import UserError
from corral.core.jit import compiled
from corral.core.types import Array
from corral.envs.suites.games import connect4, tictactoe
from corral.envs.suites.games.game import Game

_EXPLORE = 1.0
_CONNECT4, _TICTACTOE = 0, 1
# Named explicitly, since numba caches on disk only what calls its functions by name.
_GAMES = {connect4.CONNECT4: _CONNECT4, tictactoe.TICTACTOE: _TICTACTOE}


@partial(compiled, inline="always")
def _move(game: int, own: int, every: int, action: int) -> Any:
    if game == _CONNECT4:
        return connect4.move(own, every, action)
    return tictactoe.move(own, every, action)


@partial(compiled, inline="always")
def _options(game: int, every: int) -> Any:
    if game == _CONNECT4:
        return connect4.options(every)
    return tictactoe.options(every)


@partial(compiled, inline="always")
def _draw(rng_state: Array) -> Any:
    """31 random bits, by SplitMix64 (Steele et al. 2014)."""
    rng_state[0] += np.uint64(0x9E3779B97F4A7C15)
    x = rng_state[0]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((x ^ (x >> np.uint64(31))) >> np.uint64(33))


@compiled
def _random_game(game: int, own: int, every: int, rng_state: Array) -> float:
    """The result of a random game for the player to move: 1, 0 or -1."""
    sign = 1.0
    while True:
        there, count = _options(game, every), 0
        left = there
        while left:
            left &= left - 1
            count += 1
        for _ in range((_draw(rng_state) * count) >> 31):
            there &= there - 1  # skip one
        action = 0
        while not there >> action & 1:
            action += 1
        own, every, won, over = _move(game, own, every, action)
        if over:
            return sign if won else 0.0
        sign = -sign


@compiled
def _choose(there: int, child: Array, visits: Array, totals: Array, parent_visits: int, c: float) -> int:
    best, best_score, action = -1, -np.inf, 0
    while there >> action:
        if there >> action & 1:
            if child[action] == 0:
                return action
            node = child[action]
            score = totals[node] / visits[node] + c * np.sqrt(np.log(parent_visits) / visits[node])
            if score > best_score:
                best, best_score = action, score
        action += 1
    return best


@partial(compiled, nogil=True)
def _search(game: int, positions: Array, sims: int, c: float, seeds: Array, counts: Array) -> None:
    """Visits of every position's moves, into `counts` [n, actions]."""
    actions = counts.shape[1]
    boards, child = np.zeros((sims + 1, 2), np.int64), np.zeros((sims + 1, actions), np.int32)
    visits, totals = np.zeros(sims + 1, np.int64), np.zeros(sims + 1)  # of the edge to a node, for its player
    ends = np.zeros(sims + 1, np.int8)  # 0: not over, 1: won by the player who moved there, 2: drawn
    path, rng_state = np.zeros(43, np.int64), np.zeros(1, np.uint64)
    for i in range(len(positions)):
        child[:], visits[:], totals[:] = 0, 0, 0.0
        boards[0], rng_state[0], size = positions[i], seeds[i], 1
        for _ in range(sims):
            node, depth = 0, 0
            while not (ends[node] or (node and visits[node] == 0)):
                edge = _choose(_options(game, boards[node, 1]), child[node], visits, totals, visits[node], c)
                if child[node, edge] == 0:
                    own, every, won, over = _move(game, boards[node, 0], boards[node, 1], edge)
                    boards[size, 0], boards[size, 1] = own, every
                    ends[size] = 1 if won else 2 if over else 0
                    child[node, edge] = size
                    size += 1
                node = child[node, edge]
                depth += 1
                path[depth] = node
            if ends[node]:
                result = 1.0 if ends[node] == 1 else 0.0
            else:
                result = -_random_game(game, boards[node, 0], boards[node, 1], rng_state)
            for at in range(depth, -1, -1):
                visits[path[at]] += 1
                totals[path[at]] += result
                result = -result
        for edge in range(actions):
            counts[i, edge] = visits[child[0, edge]] if child[0, edge] else 0
        ends[:size] = 0


class RolloutMcts:
    """Plays the most visited move of a search; on ties, the first."""

    def __init__(self, game: Game, sims: int, explore: float = _EXPLORE):
        if game not in _GAMES:
            raise UserError(f"mcts:{sims} does not support {game.name}: use opponent=random, or your own Player.")
        if sims < 1:
            raise UserError(f"A search makes at least 1 simulation, got {sims}.")
        self._game, self.sims, self._explore = game, sims, explore

    def visits(self, positions: Array, rng: np.random.Generator) -> Array:
        counts = np.zeros((len(positions), self._game.actions), np.int64)
        seeds = rng.integers(0, 2**63, len(positions), np.uint64)
        _search(_GAMES[self._game], positions, self.sims, self._explore, seeds, counts)
        return counts

    def __call__(self, positions: Array, rng: np.random.Generator) -> Array:
        best: Array = self.visits(positions, rng).argmax(1)
        return best
