"""Tic-tac-toe on bitboards: three by three squares, three in a row win.

A state is two words of nine bits, `own` with the marks of who is to move and `every` with everybody's; bit 3 r + c is
column c of row r.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from corral.compiled import compiled
from corral.envs.suites.games.game import Game
from corral.types import Array

SIDE, SQUARES = 3, 9
_FULL = (1 << SQUARES) - 1
_LINES = np.array([0o007, 0o070, 0o700, 0o111, 0o222, 0o444, 0o421, 0o124], np.int64)


def _play(states: Array, rows: Array, squares: Array, reward: Array, over: Array) -> None:
    for i in range(len(rows)):
        row = rows[i]
        own, every = states[row, 0], states[row, 1]
        bit = np.int64(1) << squares[i]
        mine, every = own | bit, every | bit
        won = False
        for line in _LINES:
            won = won or mine & line == line
        states[row, 0], states[row, 1] = every ^ mine, every
        reward[i] = 1.0 if won else 0.0
        over[i] = won or every == _FULL


def _observe(states: Array, rows: Array, obs: Array, legal: Array) -> None:
    for i in range(len(rows)):
        own, every = states[rows[i], 0], states[rows[i], 1]
        for square in range(SQUARES):
            mine, there = own >> square & 1, every >> square & 1
            obs[i, 0, square // SIDE, square % SIDE] = mine
            obs[i, 1, square // SIDE, square % SIDE] = there & ~mine
            legal[i, square] = there == 0


play: Any = compiled(_play, nogil=True)
observe: Any = compiled(_observe, nogil=True)

TICTACTOE = Game(
    "TicTacToe", words=2, actions=SQUARES, shape=(2, SIDE, SIDE), longest=SQUARES, play=play, observe=observe
)


def best_values(states: Array) -> Array:
    """What perfect play is worth to who is to move, 1, 0 or -1, of positions that are not over."""
    known: dict[tuple[int, int], int] = {}
    return np.array([_value(int(own), int(every), known) for own, every in states])


def best_moves(own: int, every: int) -> list[int]:
    """All squares that keep the value of the position."""
    known: dict[tuple[int, int], int] = {}
    values = {square: _after(own, every, square, known) for square in range(SQUARES) if not every >> square & 1}
    return [square for square, value in values.items() if value == max(values.values())]


def _value(own: int, every: int, known: dict[tuple[int, int], int]) -> int:
    if (own, every) not in known:
        free = [square for square in range(SQUARES) if not every >> square & 1]
        known[own, every] = max(_after(own, every, square, known) for square in free)
    return known[own, every]


def _after(own: int, every: int, square: int, known: dict[tuple[int, int], int]) -> int:
    """The value of a move to who makes it."""
    mine, taken = own | 1 << square, every | 1 << square
    if any(mine & int(line) == int(line) for line in _LINES):
        return 1
    return 0 if taken == _FULL else -_value(taken ^ mine, taken, known)
