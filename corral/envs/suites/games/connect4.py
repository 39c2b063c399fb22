"""Connect Four on bitboards: seven columns of six stones, four in a row win.

A position is two integers: `own` has the stones of the player to move, `every` all stones. A column takes seven bits,
of which the highest stays empty: bit 7 c + r is row r, from below, of column c. A stone falls to the lowest empty bit
of its column, which is where adding the column's first bit to `every` carries to.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.core.jit import compiled
from corral.core.types import Array
from corral.envs.suites.games.game import Game

if TYPE_CHECKING:
    from corral.envs.suites.games.players import Player

COLUMNS, ROWS = 7, 6
_HEIGHT = ROWS + 1
_TOP = sum(1 << (_HEIGHT * column + ROWS - 1) for column in range(COLUMNS))


@partial(compiled, inline="always")
def _won(stones: int) -> bool:
    for shift in (1, 7, 6, 8):  # up, across, and both diagonals
        pairs = stones & (stones >> shift)
        if pairs & (pairs >> (2 * shift)):
            return True
    return False


@partial(compiled, inline="always")
def move(own: Any, every: Any, column: Any) -> Any:
    """The position after a move, from the other player's view; whether the mover won, and whether the game is over."""
    moved = every | (every + (np.int64(1) << (_HEIGHT * column)))
    win = _won(moved ^ (own ^ every))  # all but the opponent's
    return own ^ every, moved, win, win or moved & _TOP == _TOP


@partial(compiled, inline="always")
def options(every: int) -> int:
    """The columns with room, a bit each."""
    columns = 0
    for column in range(COLUMNS):
        columns |= (~every >> (_HEIGHT * column + ROWS - 1) & 1) << column
    return columns


@partial(compiled, nogil=True)
def _play(states: Array, rows: Array, columns: Array, reward: Array, over: Array) -> None:
    """Make legal moves in these rows; `reward` is the mover's."""
    for i in range(len(rows)):
        row = rows[i]
        states[row, 0], states[row, 1], win, over[i] = move(states[row, 0], states[row, 1], columns[i])
        reward[i] = 1.0 if win else 0.0


@partial(compiled, nogil=True)
def _observe(states: Array, rows: Array, obs: Array, legal: Array) -> None:
    """Planes [2, 6, 7] of the mover's and the opponent's stones, row 0 below; and the columns with room."""
    for i in range(len(rows)):
        own, every = states[rows[i], 0], states[rows[i], 1]
        for column in range(COLUMNS):
            for row in range(ROWS):
                bit = _HEIGHT * column + row
                mine, there = own >> bit & 1, every >> bit & 1
                obs[i, 0, row, column] = mine
                obs[i, 1, row, column] = there & ~mine
            legal[i, column] = not every >> (_HEIGHT * column + ROWS - 1) & 1


def _accuracy(player: Player) -> tuple[float, int]:
    from corral.envs.suites.games.connect4_positions import accuracy, known_positions

    return accuracy(player), len(known_positions()[0])


CONNECT4 = Game(
    "Connect4", width=2, actions=COLUMNS, shape=(2, ROWS, COLUMNS), longest=ROWS * COLUMNS,
    play=_play, observe=_observe, row_0_below=True, accuracy=_accuracy,
)  # fmt: skip
