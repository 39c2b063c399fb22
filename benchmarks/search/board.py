"""Corral's Connect Four for engines of `python -m benchmarks search`."""

from __future__ import annotations

import numpy as np

from benchmarks.search.task import Array, Problem
from corral.envs.suites.games.connect4 import CONNECT4


def boards_of(problem: Problem) -> Array:
    """The positions as boards of Corral's game."""
    boards = CONNECT4.start(len(problem.prefixes))
    for k, played in enumerate(problem.prefixes):
        for column in played:
            CONNECT4.move(boards[k : k + 1], np.array([column]))
    return boards


def count_games(depth: int) -> list[int]:
    """Perft from the empty board: the number of legal move sequences of each length up to `depth`."""
    states, counts = CONNECT4.start(1), []
    for _ in range(depth):
        above, columns = np.nonzero(CONNECT4.look(states)[1])
        states = states[above].copy()
        _, over = CONNECT4.move(states, columns)
        counts.append(len(states))
        states = states[~over]
    return counts
