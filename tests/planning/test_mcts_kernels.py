"""The compiled search does what the paper says, on Connect Four: counts equal those of a literal version."""

import math

import numpy as np
import pytest
from helpers.reference import search as literal

from corral.envs.suites.games.connect4 import CONNECT4
from corral.planning.mcts.gumbel import Gumbel, visits_in_order
from corral.planning.mcts.root import gumbel_result
from corral.planning.mcts.search import TreeSearch
from corral.planning.mcts.selection import Puct

WIDTH = CONNECT4.actions
C_INIT = 1.25


def positions(count):
    """Games that are not over, after 0 to 20 random moves."""
    rng, found = np.random.default_rng(0), []
    while len(found) < count:
        board, over = (0, 0), False
        for _ in range(rng.integers(21)):
            board, _, over = literal_step(board, int(rng.choice(legal(board))))
            if over:
                break
        if not over:
            found.append(board)
    return found


def look(board):
    obs, mask = CONNECT4.look(np.array([board], np.int64))
    return obs[0], mask[0]


def legal(board):
    return np.flatnonzero(look(board)[1])


def literal_step(board, column):
    state = np.array([board], np.int64)
    reward, over = CONNECT4.move(state, [column])
    return tuple(state[0].tolist()), float(reward[0]), bool(over[0])


WEIGHTS = np.random.default_rng(1).normal(size=(84, WIDTH + 1)).astype(np.float32)


def evaluate(obs, mask, ids):
    """Some network: priors of the legal moves, and a value."""
    out = obs.reshape(len(obs), -1) @ WEIGHTS
    raw = np.where(mask, np.exp(0.3 * out[:, :WIDTH]), 0)
    priors = (raw / np.maximum(raw.sum(1, keepdims=True), 1e-9)).astype(np.float32)
    return np.where(mask, priors, np.float32(-1)).astype(np.float32), np.tanh(0.2 * out[:, WIDTH]).astype(np.float32)


def literal_evaluate(board):
    obs, mask = look(board)
    priors, value = evaluate(obs[None], mask[None], None)
    return {int(a): float(priors[0, a]) for a in np.flatnonzero(mask)}, float(value[0])


def search(boards, simulations, leaves, rule):
    states = CONNECT4.states()
    found = TreeSearch(states, evaluate, len(boards), WIDTH, simulations, leaves)
    forest = found.run(states.put(np.array(boards, np.int64)), rule)
    assert not forest.inflight.any()
    assert not forest.pending.any()
    return forest


PUCT = Puct(C_INIT)


def test_puct_counts_equal_plain_search():
    boards = positions(256)
    forest = search(boards, 60, 1, PUCT)
    for t, board in enumerate(boards):
        tree = literal.Tree(board, 0, literal_step, literal_evaluate)
        for _ in range(60):
            tree.simulate(literal.puct(C_INIT))
        np.testing.assert_array_equal(forest.n[t, 0], literal.counts(tree, WIDTH), str(board))
        q = [tree.root.w[a] for a in sorted(tree.root.priors)]
        np.testing.assert_allclose(forest.total[t, 0][forest.prior[t, 0] >= 0], q, rtol=1e-4, atol=1e-5)


def test_gumbel_counts_equal_published_formulas():
    boards, simulations = positions(64), 50
    noise = np.random.default_rng(2).gumbel(size=(len(boards), WIDTH))
    orders = np.stack([visits_in_order(min(4, len(legal(board))), simulations) for board in boards])
    rule = Gumbel(noise, orders, np.zeros((len(boards), WIDTH), np.int32))
    forest, trees = search(boards, simulations, 1, rule), np.arange(len(boards))
    values = gumbel_result(forest, trees, rule).values
    for t, board in enumerate(boards):
        tree = literal.Tree(board, 0, literal_step, literal_evaluate)
        for _ in range(simulations):
            tree.simulate(literal.gumbel(noise[t], orders[t]))
        np.testing.assert_array_equal(forest.n[t, 0], literal.counts(tree, WIDTH), str(board))
        assert values[t] == pytest.approx(literal.gumbel_value(tree.root), abs=1e-5)


@pytest.mark.parametrize("considered", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("simulations", [1, 5, 16, 50, 200])
def test_sequential_halving_gives_every_round_the_same_share(considered, simulations):
    order = visits_in_order(considered, simulations)
    visits = np.zeros(considered, int)
    for due in order:  # always the first of those that are due: who is better never changes here
        visits[np.flatnonzero(visits == due)[0]] += 1
    assert visits.sum() == simulations
    assert (np.diff(visits) <= 0).all()
    rounds = math.ceil(math.log2(considered)) if considered > 1 else 1
    if simulations >= considered * rounds:
        assert visits[-1] == simulations // (rounds * considered) or considered == 1


def test_leaves_in_flight_expand_no_node_twice():
    boards = positions(32)
    forest = search(boards, 60, 8, PUCT)
    np.testing.assert_array_equal(forest.visits[:, 0], 61)
    np.testing.assert_array_equal(forest.n[:, 0].sum(1), 60)
    for t in range(len(boards)):
        children = forest.child[t, : forest.size[t]]
        found = np.sort(children[(children > 0) & (forest.prior[t, : forest.size[t]] >= 0)])
        np.testing.assert_array_equal(found, np.arange(1, forest.size[t]))


def test_no_move_into_a_full_column_is_ever_followed():
    boards = positions(128)
    forest = search(boards, 100, 4, PUCT)
    for t, board in enumerate(boards):
        mask = look(board)[1]
        assert not forest.n[t, 0][~mask].any()
