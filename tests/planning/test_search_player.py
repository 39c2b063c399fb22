"""A search as a player of board games."""

import numpy as np
import pytest

from benchmarks.search.playouts import RandomPlayouts
from corral.envs.suites.games.connect4 import CONNECT4
from corral.envs.suites.games.players import Random
from corral.planning.config import SearchConfig
from corral.planning.search_player import SearchPlayer


def wins_against_chance(player, begins, games, rng):
    """Games that a player wins, of several that are played at once."""
    boards, wins = CONNECT4.start(games), 0
    for ply in range(CONNECT4.longest):
        own = (ply % 2 == 0) == begins
        reward, over = CONNECT4.move(boards, (player if own else Random(CONNECT4))(boards.copy(), rng))
        wins += int(np.sum(reward > 0)) if own else 0
        boards = boards[~over]
        if not len(boards):
            break
    return wins


@pytest.mark.parametrize("root", ["gumbel", "puct"])
def test_a_search_plays_all_boards_at_once_and_beats_chance(root):
    def make(states, actions):
        return RandomPlayouts(states, 0)

    player = SearchPlayer(CONNECT4, make, 200, SearchConfig(root_selection=root), boards=7)  # so they play in turns
    rng = np.random.default_rng(0)
    assert sum(wins_against_chance(player, begins, 10, rng) for begins in (True, False)) >= 18
    win = CONNECT4.start(1)
    for move in (0, 6, 1, 6, 2, 5):
        CONNECT4.move(win, np.array([move]))
    assert player(np.repeat(win, 9, axis=0), rng).tolist() == [3] * 9
