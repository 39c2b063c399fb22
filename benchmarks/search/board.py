"""Corral's Connect Four for engines of `python -m benchmarks search`."""

from __future__ import annotations

import numpy as np

from benchmarks.search.task import Array, Problem
from corral.envs.suites.games.connect4 import CONNECT4


def boards_of(problem: Problem) -> Array:
    """The positions as words of the game."""
    boards = CONNECT4.start(len(problem.prefixes))
    for k, played in enumerate(problem.prefixes):
        for column in played:
            CONNECT4.move(boards[k : k + 1], np.array([column]))
    return boards


def count_games(depth: int) -> list[int]:
    """Sequences of moves from the empty board by their length, of games that last until the last one."""
    states, counts = CONNECT4.start(1), []
    for _ in range(depth):
        above, columns = np.nonzero(CONNECT4.look(states)[1])
        states = states[above].copy()
        _, over = CONNECT4.move(states, columns)
        counts.append(len(states))
        states = states[~over]
    return counts
