"""Tic-tac-toe on bitboards: three by three squares, three in a row win.

A position is two integers of nine bits: `own` has the marks of the player to move, `every` all marks; bit 3 r + c is
column c of row r.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from corral.core.jit import compiled
from corral.core.types import Array
from corral.envs.suites.games.game import Game

SIDE, SQUARES = 3, 9
_FULL = (1 << SQUARES) - 1
_LINES = np.array([0o007, 0o070, 0o700, 0o111, 0o222, 0o444, 0o421, 0o124], np.int64)


@partial(compiled, inline="always")
def move(own: Any, every: Any, square: Any) -> Any:
    """The position after a move, from the other player's view; whether the mover won, and whether the game is over."""
    bit = np.int64(1) << square
    mine, taken = own | bit, every | bit
    win = False
    for line in _LINES:
        win = win or mine & line == line
    return taken ^ mine, taken, win, win or taken == _FULL


@partial(compiled, inline="always")
def options(every: int) -> int:
    """The empty squares, a bit each."""
    return ~every & _FULL


@partial(compiled, nogil=True)
def _play(states: Array, rows: Array, squares: Array, reward: Array, over: Array) -> None:
    for i in range(len(rows)):
        row = rows[i]
        states[row, 0], states[row, 1], win, over[i] = move(states[row, 0], states[row, 1], squares[i])
        reward[i] = 1.0 if win else 0.0


@partial(compiled, nogil=True)
def _observe(states: Array, rows: Array, obs: Array, legal: Array) -> None:
    for i in range(len(rows)):
        own, every = states[rows[i], 0], states[rows[i], 1]
        for square in range(SQUARES):
            mine, there = own >> square & 1, every >> square & 1
            obs[i, 0, square // SIDE, square % SIDE] = mine
            obs[i, 1, square // SIDE, square % SIDE] = there & ~mine
            legal[i, square] = there == 0


TICTACTOE = Game(
    "TicTacToe", width=2, actions=SQUARES, shape=(2, SIDE, SIDE), longest=SQUARES, play=_play, observe=_observe
)


def best_moves(own: int, every: int) -> list[int]:
    """All squares that keep the value of the position."""
    values = {square: _after(own, every, square) for square in range(SQUARES) if not every >> square & 1}
    return [square for square, value in values.items() if value == max(values.values())]


@cache  # there are 5,478 positions
def best_value(own: int, every: int) -> int:
    """The value under perfect play of a position that is not over, for the player to move: 1, 0 or -1."""
    return max(_after(own, every, square) for square in range(SQUARES) if not every >> square & 1)


def _after(own: int, every: int, square: int) -> int:
    own, every, won, over = map(int, move.py_func(own, every, square))
    return 1 if won else 0 if over else -best_value(own, every)
