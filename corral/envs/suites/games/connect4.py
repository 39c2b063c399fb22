"""Connect Four on bitboards: seven columns of six stones, four in a row win.

A position is two integers: `own` has the stones of the player to move, `every` all stones. A column takes seven bits,
of which the highest stays empty: bit 7 c + r is row r, from below, of column c. A stone falls to the lowest empty bit
of its column, which is where adding the column's first bit to `every` carries to.
"""

from __future__ import annotations

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


def _won(stones: int) -> bool:
    for shift in (1, 7, 6, 8):  # up, across, and both diagonals
        pairs = stones & (stones >> shift)
        if pairs & (pairs >> (2 * shift)):
            return True
    return False


won: Any = compiled(_won, inline="always")


def _move(own: Any, every: Any, column: Any) -> Any:
    """The position after a move, from the other player's view; whether the mover won, and whether the game is over."""
    moved = every | (every + (np.int64(1) << (_HEIGHT * column)))
    win = won(moved ^ (own ^ every))  # all but the opponent's
    return own ^ every, moved, win, win or moved & _TOP == _TOP


def _options(every: int) -> int:
    columns = 0
    for column in range(COLUMNS):
        columns |= (~every >> (_HEIGHT * column + ROWS - 1) & 1) << column
    return columns


move: Any = compiled(_move, inline="always")
options: Any = compiled(_options, inline="always")


def _play(states: Array, rows: Array, columns: Array, reward: Array, over: Array) -> None:
    """Make legal moves in these rows; `reward` is the mover's."""
    for i in range(len(rows)):
        row = rows[i]
        states[row, 0], states[row, 1], win, over[i] = move(states[row, 0], states[row, 1], columns[i])
        reward[i] = 1.0 if win else 0.0


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


play: Any = compiled(_play, nogil=True)
observe: Any = compiled(_observe, nogil=True)


def _accuracy(player: Player) -> tuple[float, int]:
    from corral.envs.suites.games.connect4_positions import accuracy, known_positions

    return accuracy(player), len(known_positions()[0])


CONNECT4 = Game(
    "Connect4", width=2, actions=COLUMNS, shape=(2, ROWS, COLUMNS), longest=ROWS * COLUMNS, play=play, observe=observe,
    row_0_below=True, accuracy=_accuracy,
)  # fmt: skip
