"""A game outside of Corral's own suites that has the hooks of one."""

from dataclasses import replace

import numpy as np

from corral.envs.suites.games.board_env import BoardEnv
from corral.envs.suites.games.tictactoe import TICTACTOE

POSITIONS = np.array([[0o003, 0o033], [0o110, 0o116]])  # own marks, all marks; the player to move wins at once
WINS = np.array([2, 0])


def accuracy(player):
    moves = player(POSITIONS.copy(), np.random.default_rng(0))
    return float(np.mean(moves == WINS)), len(WINS)


def SolvedTicTacToe():
    return BoardEnv(replace(TICTACTOE, accuracy=accuracy))
