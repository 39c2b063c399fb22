"""Connect Four solved: by brute force the same, however small the table, and honest about its budget."""

from functools import cache

import numpy as np
import pytest

from corral.envs.suites.games.connect4 import CONNECT4
from corral.envs.suites.games.connect4_positions import accuracy, generate, known_positions
from corral.envs.suites.games.connect4_solver import ILLEGAL, UNKNOWN, Connect4Solver
from corral.envs.suites.games.players import Random
from corral.envs.suites.games.rollout_mcts import RolloutMcts


@cache
def brute(own, every):
    """The score of a position, by trying everything; by the rules that environments have."""
    position = np.array([[own, every]])
    columns = np.flatnonzero(CONNECT4.look(position)[1][0])
    return max(brute_after(own, every, int(column)) for column in columns)


def brute_after(own, every, column):
    states = np.array([[own, every]])
    stones = int(every).bit_count()
    reward, over = CONNECT4.move(states, np.array([column]))
    if reward[0]:
        return (43 - stones) // 2
    return 0 if over[0] else -brute(*states[0].tolist())


def positions(stones, count, seed):
    rng, found, chance = np.random.default_rng(seed), [], Random(CONNECT4)
    while len(found) < count:
        states = CONNECT4.start(1)
        for _ in range(stones):
            _, over = CONNECT4.move(states, chance(states, rng))
            if over[0]:
                break
        else:
            found.append(states[0])
    return np.array(found)


@pytest.mark.parametrize("stones", [30, 33, 36, 39, 41])
def test_scores_and_values_are_those_of_brute_force(stones):
    solver, where = Connect4Solver(), positions(stones, 12, stones)
    scores, values = solver.scores(where, 10**8), solver.values(where, 10**8)
    for (own, every), row, signs in zip(where.tolist(), scores, values, strict=True):
        legal = CONNECT4.look(np.array([[own, every]]))[1][0]
        np.testing.assert_array_equal(row != ILLEGAL, legal)
        expected = [brute_after(own, every, column) for column in np.flatnonzero(legal).tolist()]
        assert row[legal].tolist() == expected
        assert signs[legal].tolist() == np.sign(expected).tolist()


def test_tiny_transposition_table_gives_equal_scores():
    where = positions(20, 5, 0)
    np.testing.assert_array_equal(Connect4Solver(4).scores(where, 10**9), Connect4Solver(20).scores(where, 10**9))


def test_filled_transposition_table_gives_equal_scores():
    where, solver = positions(18, 6, 1), Connect4Solver()
    together = solver.values(where, 20_000)
    assert (together == UNKNOWN).any()  # so the budget matters, and what it reaches must not depend on the table
    for k in (5, 2, 0):
        np.testing.assert_array_equal(solver.values(where[k : k + 1], 20_000)[0], together[k])


def test_exhausted_budget_leaves_moves_unknown():
    where = positions(16, 4, 2)
    exact, cheap = Connect4Solver().values(where, 10**9), Connect4Solver().values(where, 3_000)
    assert (cheap == UNKNOWN).any()
    known = cheap != UNKNOWN
    assert (cheap == exact)[known].all()


def test_solved_positions_are_distinct_and_legal():
    where, values = known_positions()
    assert len(where) == 1000
    assert len({row.tobytes() for row in where}) == 1000
    _, legal = CONNECT4.look(where)
    np.testing.assert_array_equal(values != ILLEGAL, legal)
    assert (np.where(legal, values, 9).min(1) < values.max(1)).all()
    stones = [int(every).bit_count() for _, every in where.tolist()]
    assert (min(stones), max(stones)) == (10, 30)


def test_known_positions_have_the_values_that_the_solver_finds():
    where, values = known_positions()
    late = np.array([int(every).bit_count() >= 18 for _, every in where.tolist()])
    np.testing.assert_array_equal(Connect4Solver().values(where[late], 10**9), values[late])


@pytest.mark.slow
def test_accuracy_is_one_for_the_solver_and_grows_with_search():
    where, values = known_positions()
    best = dict(zip(map(bytes, where), values.argmax(1), strict=True))
    assert accuracy(lambda rows, rng: np.array([best[bytes(row)] for row in rows])) == 1.0
    assert accuracy(Random(CONNECT4)) < accuracy(RolloutMcts(CONNECT4, 100)) < accuracy(RolloutMcts(CONNECT4, 3000)) < 1


def test_positions_are_reproduced_by_seed():
    first, again = (generate(6, 1, plies=(24, 28)) for _ in range(2))
    assert [int(every).bit_count() for _, every in first[0].tolist()] == [24, 28] * 3
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)
