"""Opponents of known strength: by random games, and perfect ones."""

import numpy as np
import pytest
from helpers.reference.uct import uct

from corral.core.errors import UserError
from corral.envs.suites.games.connect4 import CONNECT4
from corral.envs.suites.games.connect4_solver import ILLEGAL, UNKNOWN, Connect4Solver
from corral.envs.suites.games.game import Game
from corral.envs.suites.games.players import PerfectConnect4, Random, make_player, perfect, promising
from corral.envs.suites.games.rollout_mcts import RolloutMcts
from corral.envs.suites.games.tictactoe import TICTACTOE, best_moves

GAMES = {"connect4": CONNECT4, "tictactoe": TICTACTOE}


def after(game, moves):
    states = game.start(1)
    for move in moves:
        game.move(states, np.array([move]))
    return states


def random_moves(game, count, rng):
    """A game that is not over after so many moves."""
    while True:
        states, moves = game.start(1), []
        for _ in range(count):
            moves.append(int(Random(game)(states, rng)[0]))
            _, over = game.move(states, np.array(moves[-1:]))
            if over[0]:
                break
        else:
            return moves


class OneSeed:
    """What RolloutMcts draws its seeds from."""

    def __init__(self, seed):
        self.seed = seed

    def integers(self, low, high, count, dtype):
        return np.full(count, self.seed, dtype)


@pytest.mark.parametrize("name", GAMES)
def test_compiled_rollout_mcts_equals_plain_uct(name):
    game, rng = GAMES[name], np.random.default_rng(0)
    for k in range(6):
        moves = random_moves(game, k, rng)
        sims, c, seed = int(rng.integers(1, 150)), float(rng.uniform(0.5, 2)), int(rng.integers(2**62))
        found = RolloutMcts(game, sims, c).visits(after(game, moves), OneSeed(seed))[0]
        assert found.tolist() == uct(name, moves, sims, c, seed)
        assert found.sum() == sims


def test_positions_of_a_batch_do_not_depend_on_each_other():
    positions = np.concatenate([after(CONNECT4, moves) for moves in ([], [3], [3, 3, 2])])
    search = RolloutMcts(CONNECT4, 300)
    together = search.visits(positions, OneSeed(5))
    for k in range(3):
        np.testing.assert_array_equal(search.visits(positions[k : k + 1], OneSeed(5))[0], together[k])


def test_more_simulations_win_more():
    rng, wins = np.random.default_rng(0), 0.0
    weak, strong = Random(CONNECT4), RolloutMcts(CONNECT4, 100)
    for k in range(20):
        states, over, turn = CONNECT4.start(1), [False], k % 2
        while not over[0]:
            reward, over = CONNECT4.move(states, (strong if turn == 0 else weak)(states, rng))
            turn = 1 - turn
        wins += reward[0] if turn == 1 else 0
    assert wins >= 18


def test_perfect_tictactoe_plays_the_best_moves_and_all_of_them():
    rng, player = np.random.default_rng(0), make_player(TICTACTOE, "perfect")
    position = after(TICTACTOE, [4])
    seen = {int(player(position, rng)[0]) for _ in range(50)}
    assert seen == set(best_moves(*position[0].tolist())) == {0, 2, 6, 8}


def test_perfect_connect4_fastest_win_slowest_loss():
    rng, player, solver = np.random.default_rng(0), PerfectConnect4(), Connect4Solver()
    for stones in (18, 22, 26):
        position = after(CONNECT4, random_moves(CONNECT4, stones, rng))
        scores = solver.scores(position, 10**8)[0]
        assert scores[player(position, rng)[0]] == scores.max()


def test_perfect_connect4_without_budget_blocks_threats():
    rng, player = np.random.default_rng(0), PerfectConnect4(budget=50, sims=30_000)
    stop = after(CONNECT4, [6, 0, 6, 1, 4, 2])
    assert player(stop, rng).tolist() == [3]
    assert player(CONNECT4.start(1), rng).tolist() == [3]


def test_unknown_moves_are_preferred_to_losing_ones():
    def left(*values):
        return promising(np.array(values)).tolist()

    assert left(-1, 0, 1, UNKNOWN) == [2]
    assert left(-1, 0, UNKNOWN, ILLEGAL) == [1, 2]
    assert left(-1, UNKNOWN, ILLEGAL) == [1]
    assert left(-1, ILLEGAL, -1) == [0, 2]
    assert left(0, -1, 0) == [0, 2]


def test_games_that_they_do_not_know_are_refused():
    other = Game("Other", 2, 7, (2, 6, 7), 42, CONNECT4.play, CONNECT4.observe)
    for make in (perfect, lambda game: RolloutMcts(game, 5)):
        with pytest.raises(UserError, match="Other"):
            make(other)
