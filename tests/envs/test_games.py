"""The games keep their rules."""

import numpy as np
import pytest

from corral.envs.suites.games.connect4 import CONNECT4
from corral.envs.suites.games.tictactoe import TICTACTOE, best_moves, best_value

GAMES = {"connect4": CONNECT4, "tictactoe": TICTACTOE}
LINES = {"connect4": 4, "tictactoe": 3}


def won(board, length):
    """Whether a plane has so many in a row, the slow way."""
    rows, columns = board.shape
    for r in range(rows):
        for c in range(columns):
            for dr, dc in ((0, 1), (1, 0), (1, 1), (1, -1)):
                squares = [(r + k * dr, c + k * dc) for k in range(length)]
                if all(0 <= a < rows and 0 <= b < columns and board[a, b] for a, b in squares):
                    return True
    return False


@pytest.mark.parametrize("name", GAMES)
def test_random_games_end_as_plain_rules(name):
    game, rng, ends = GAMES[name], np.random.default_rng(0), []
    for _ in range(200):
        states, over, moves = game.start(1), np.array([False]), 0
        while not over[0]:
            obs, legal = game.look(states)
            action = rng.choice(np.flatnonzero(legal[0]))
            reward, over = game.move(states, np.array([action]))
            moves += 1
            after, legal_after = game.look(states)
            mine, other = after[0, 1], after[0, 0]  # seen by the other
            np.testing.assert_array_equal(other, obs[0, 1])
            assert (mine - obs[0, 0]).sum() == 1
            assert not (mine * other).any()
            win = won(mine, LINES[name])
            assert bool(over[0]) == (win or not legal_after.any())
            assert reward[0] == float(win)
        ends.append((moves, float(reward[0])))
    assert max(moves for moves, _ in ends) <= game.longest
    assert {reward for _, reward in ends} == {0.0, 1.0} or name == "connect4"


def test_connect4_perft_counts():
    """Sequences of moves that no earlier move has ended; 7^d as long as nobody can have won."""
    states, counts = CONNECT4.start(1), []
    for _ in range(8):
        above, columns = np.nonzero(CONNECT4.look(states)[1])
        states = states[above].copy()
        _, over = CONNECT4.move(states, columns)
        counts.append(len(states))
        states = states[~over]
    assert counts == [7, 49, 343, 2401, 16807, 117649, 823536, 5673234]


def test_perfect_tictactoe_draws_and_takes_wins():
    assert best_value(0, 0) == 0
    assert best_moves(0, 0) == list(range(9))
    assert best_value(0b000000011, 0b011000011) == 1  # 0 and 1 against 6 and 7: 2 wins
    assert best_moves(0b000010000, 0b000010011) == [2]  # or the other has the first row
