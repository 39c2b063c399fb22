"""Matches: colours swapped, no game twice, points and Elo as everybody counts them."""

import math

import numpy as np
import pytest

from benchmarks.search.match import Match, openings, play_match
from corral.core.errors import UserError
from corral.envs.suites.games.connect4 import CONNECT4
from corral.envs.suites.games.players import Random, make_player
from corral.envs.suites.games.rollout_mcts import RolloutMcts
from corral.envs.suites.games.tictactoe import TICTACTOE


def first_legal(positions, rng):
    return np.argmax(CONNECT4.look(positions)[1], axis=1)


def test_first_player_alternates_in_a_match():
    """Who fills the first column and begins has four in a row first."""

    def second_column(positions, rng):
        return np.where(CONNECT4.look(positions)[1][:, 1], 1, 0)

    match = play_match(CONNECT4, first_legal, second_column, 2, np.random.default_rng(0), opening=0)
    assert (match.wins, match.draws, match.losses) == (1, 0, 1)
    assert match.began == (1, 0, 0)
    back = play_match(CONNECT4, second_column, first_legal, 2, np.random.default_rng(0), opening=0)
    assert (back.wins, back.losses, back.began) == (1, 1, (1, 0, 0))


@pytest.mark.parametrize("opening", [1, 3, 4])
def test_players_are_asked_only_for_own_turns(opening):
    asked = {"one": [], "other": []}

    def player(name):
        def decide(positions, rng):
            asked[name].append(CONNECT4.look(positions)[0].sum((1, 2, 3)).astype(int))
            return first_legal(positions, rng)

        return decide

    games = 6
    play_match(CONNECT4, player("one"), player("other"), games, np.random.default_rng(0), opening=opening)
    for name in asked:
        stones = np.concatenate(asked[name])
        assert stones.min() >= opening
        # in every game each player sees either all even or all odd numbers of stones, half of the games each
        assert np.sum(stones == opening) == games // 2
        assert np.sum(stones == opening + 1) <= games // 2


def test_random_openings_make_games_differ():
    rng = np.random.default_rng(0)
    assert play_match(CONNECT4, first_legal, first_legal, 40, rng, opening=0).different == 2
    match = play_match(CONNECT4, first_legal, first_legal, 40, rng, opening=3)
    assert match.different == match.games == 40
    starts = openings(CONNECT4, 200, 3, rng)
    assert len({row.tobytes() for row in starts}) == 200


def test_openings_are_not_over_and_too_many_are_refused():
    _, legal = TICTACTOE.look(openings(TICTACTOE, 200, 6, np.random.default_rng(0)))
    assert (legal.sum(1) == 3).all()
    with pytest.raises(UserError, match="longer opening"):
        openings(TICTACTOE, 10, 1, np.random.default_rng(0))


def test_illegal_move_of_a_player_is_named():
    def cheat(positions, rng):
        return np.full(len(positions), 3)

    with pytest.raises(UserError, match="cheat makes moves"):
        play_match(CONNECT4, cheat, cheat, 2, np.random.default_rng(0))
    with pytest.raises(UserError, match="even number"):
        play_match(CONNECT4, cheat, cheat, 3, np.random.default_rng(0))


def test_elo_is_the_logistic_one_and_its_interval_holds_it():
    match = Match(30, 0, 10, (15, 0, 5), 40)
    assert match.score == 0.75
    assert match.elo == pytest.approx(400 * math.log10(3))
    low, high = match.elo_interval
    assert low < match.elo < high
    p, n, z = 0.75, 40, 1.96  # Wilson (1927): the roots of (p - x)^2 = z^2 x (1 - x) / n
    for elo in (low, high):
        x = 1 / (1 + 10 ** (-elo / 400))
        assert (p - x) ** 2 == pytest.approx(z**2 * x * (1 - x) / n)
    lost = Match(0, 0, 20, (0, 0, 10), 20)
    assert lost.elo == -math.inf
    assert lost.elo_interval[0] == -math.inf
    assert -1000 < lost.elo_interval[1] < 0
    even = Match(5, 10, 5, (2, 5, 3), 20)
    assert even.elo == 0
    assert even.elo_interval[0] == pytest.approx(-even.elo_interval[1])


def test_perfect_players_of_tictactoe_draw_and_beat_chance():
    perfect, rng = make_player(TICTACTOE, "perfect"), np.random.default_rng(0)
    drawn = play_match(TICTACTOE, perfect, perfect, 20, rng, opening=0)
    assert (drawn.wins, drawn.draws, drawn.losses) == (0, 20, 0)
    assert play_match(TICTACTOE, perfect, Random(TICTACTOE), 40, rng, opening=0).losses == 0


def test_the_same_generator_repeats_a_match():
    def result(seed):
        rng = np.random.default_rng(seed)
        return play_match(CONNECT4, RolloutMcts(CONNECT4, 50), Random(CONNECT4), 10, rng, opening=0)

    assert result(1) == result(1)
