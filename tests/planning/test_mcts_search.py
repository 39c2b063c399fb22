"""The search as a whole: what it finds, how often it asks, and how strong it is without having learned."""

import numpy as np
import pytest

from benchmarks.search.playouts import RandomPlayouts
from corral.core.errors import UserError
from corral.envs.suites.games.connect4 import CONNECT4
from corral.envs.suites.games.tictactoe import TICTACTOE, best_moves
from corral.planning.mcts.evaluation import uniform_evaluation
from corral.planning.mcts.search import TreeSearch
from corral.planning.mcts.selection import Puct


def after(game, *moves):
    """The position after these moves, as a batch of one."""
    states = game.start(1)
    for move in moves:
        _, over = game.move(states, np.array([move]))
        assert not over[0]
    return states


def most_visited(game, positions, sims, leaves=1, seed=0):
    states = game.states()
    search = TreeSearch(states, RandomPlayouts(states, seed), len(positions), game.actions, sims, leaves)
    return search.run(states.put(positions), Puct(c_init=4.0)).n[: len(positions), 0].argmax(axis=1)


@pytest.mark.parametrize("leaves", [1, 8])
def test_it_takes_a_win_and_stops_the_others(leaves):
    win = after(CONNECT4, 0, 6, 1, 6, 2, 5)  # 3 completes the row
    stop = after(CONNECT4, 6, 0, 6, 1, 4, 2)  # or the other does
    assert most_visited(CONNECT4, np.concatenate([win, stop]), 200, leaves).tolist() == [3, 3]


def test_a_wave_asks_once_for_all_trees_and_leaves():
    asked = []

    def evaluate(obs, legal, ids):
        asked.append(len(obs))
        return uniform_evaluation(obs, legal, ids)

    states = CONNECT4.states()
    search = TreeSearch(states, evaluate, trees=16, width=7, sims=64, leaves=4)
    search.run(states.put(CONNECT4.start(16)), Puct())
    assert len(asked) == search.waves + 1  # and the roots
    assert sum(asked[1:]) == 16 * 64
    assert search.waves < 64


@pytest.mark.parametrize("sims", [0, -3])
def test_fewer_than_one_simulation_is_refused(sims):
    with pytest.raises(UserError, match="at least 1 simulation"):
        TreeSearch(TICTACTOE.states(), uniform_evaluation, trees=1, width=9, sims=sims)


def test_tictactoe_by_search_alone_never_loses_to_perfect_play():
    rng = np.random.default_rng(0)
    for first in (0, 1):  # who moves first: the search, or the perfect player
        for seed in range(5):
            states, over, turn = TICTACTOE.start(1), np.array([False]), 0
            while not over[0]:
                if turn == first:
                    move = most_visited(TICTACTOE, states, 1600, seed=seed)[0]
                else:
                    move = rng.choice(best_moves(*states[0].tolist()))
                reward, over = TICTACTOE.move(states, np.array([move]))
                turn = 1 - turn
            assert reward[0] == 0 or turn != first, "the perfect player has won"


def test_the_same_seed_finds_the_same_and_another_does_not():
    def counts(seed):
        states = CONNECT4.states()
        found = TreeSearch(states, RandomPlayouts(states, seed), trees=1, width=7, sims=100)
        return found.run(states.put(CONNECT4.start(1)), Puct()).n[0, 0].tolist()

    assert counts(1) == counts(1)
    assert counts(1) != counts(2)
