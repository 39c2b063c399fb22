"""Boards as text and as pictures."""

from __future__ import annotations

import numpy as np

from corral.core.types import Array
from corral.envs.suites.games.game import Game

_CELL, _RADIUS = 48, 19
_BACK = np.array((32, 78, 156), np.uint8)
_COLOURS = np.array([(226, 232, 240), (214, 48, 49), (250, 196, 40)], np.uint8)  # nobody, who began, the other
_SIGNS = ".XO"


def owners(game: Game, obs: Array, to_play: int) -> Array:
    """Whose square each is, [rows, columns] as drawn: 1 of who began, 2 of the other, 0 of nobody."""
    began, other = (obs[0], obs[1]) if to_play == 0 else (obs[1], obs[0])
    board: Array = began.astype(np.int64) + 2 * other.astype(np.int64)
    return board[::-1] if game.row_0_below else board


def as_text(board: Array) -> str:
    """A line for every row."""
    return "\n".join(" ".join(_SIGNS[owner] for owner in row) for row in board.tolist())


def as_picture(board: Array) -> Array:
    """Bytes [height, width, 3], a disc for every square."""
    offset = np.arange(_CELL) - (_CELL - 1) / 2
    disc = offset[:, None] ** 2 + offset[None, :] ** 2 <= _RADIUS**2
    squares = np.where(disc[..., None], _COLOURS[board][:, :, None, None], _BACK)  # [rows, columns, y, x, 3]
    rows, columns = board.shape
    picture: Array = squares.transpose(0, 2, 1, 3, 4).reshape(rows * _CELL, columns * _CELL, 3)
    return picture
