"""Searches where steps are random: values are means over outcomes, not of one that the search happens to know."""

import numpy as np
import pytest
from helpers.scripted_states import ScriptedStates

from corral.planning.mcts.evaluation import uniform_evaluation
from corral.planning.mcts.gumbel import Gumbel
from corral.planning.mcts.root import draw_gumbel, root_values
from corral.planning.mcts.search import TreeSearch
from corral.planning.mcts.selection import Puct

PAYS = (0.3, 0.6, 0.5)


def pull(place, arm, rng):
    """A slot machine, one pull."""
    return 1, float(rng.random() < PAYS[arm]), True, False


def search_of(states, width, sims, leaves, rule=None, rng=True, discount=1.0):
    search = TreeSearch(
        states, uniform_evaluation, 4, width, sims, leaves, discount, rng=np.random.default_rng(5) if rng else None
    )
    trees = np.arange(4)
    search.plant(trees, states.put([0] * 4))
    if rule is Gumbel:
        search.grow(trees, draw_gumbel(search.forest, trees, width, sims, 1.0, np.random.default_rng(1)))
    else:
        search.grow(trees, Puct(c_init=3.0))
    forest = search.forest
    assert not forest.inflight.any()
    assert not forest.pending.any()
    assert (forest.n[:, 0].sum(1) == sims).all()
    assert len(states.kept) == forest.size.sum()  # whatever came to nothing has been dropped
    return forest


@pytest.mark.parametrize("leaves", [1, 8])
@pytest.mark.parametrize("rule", [Puct, Gumbel])
def test_a_slot_machine_is_worth_its_true_mean(leaves, rule):
    forest = search_of(ScriptedStates(pull, 3, stochastic=True), 3, 600, leaves, rule)
    n, total = forest.n[:, 0].sum(0), forest.total[:, 0].sum(0)
    for pays, visits, paid in zip(PAYS, n, total, strict=True):
        assert visits > 20
        assert abs(paid / visits - pays) < 4 * np.sqrt(pays * (1 - pays) / visits)


@pytest.mark.parametrize("leaves", [1, 4])
@pytest.mark.parametrize("sides", [2, 6, 20])
@pytest.mark.parametrize("sims", [8, 32])
def test_rare_outcomes_are_weighted_by_probability(leaves, sides, sims):
    """One throw in ten pays 10, and both show half of the sides: worth 1 in the mean of many trees."""
    trees = 1000

    def throw(place, arm, rng):
        lucky = rng.random() < 0.1
        side = int(rng.integers(sides // 2))
        return 1 + side + sides * lucky, 10.0 * lucky, True, False

    states = ScriptedStates(throw, 2, stochastic=True)
    search = TreeSearch(states, uniform_evaluation, trees, 2, sims, leaves, rng=np.random.default_rng(3))
    every = np.arange(trees)
    search.plant(every, states.put([0] * trees))
    search.grow(every, Puct(c_init=1e6))  # as often the one as the other, whatever they pay
    mean = search.forest.total[:, 0] / search.forest.n[:, 0]
    assert abs(mean.mean() - 1) < 4 * mean.std() / np.sqrt(mean.size)


def test_replayed_rng_gives_one_outcome():
    forest = search_of(ScriptedStates(pull, 3), 3, 50, 4, rng=False)
    means = forest.total[:, 0] / forest.n[:, 0]
    assert set(means.ravel().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("leaves", [1, 8])
@pytest.mark.parametrize("rule", [Puct, Gumbel])
def test_it_looks_below_outcomes_and_decides_in_each_of_them(leaves, rule):
    """A die of six sides is thrown; then saying what it shows pays 1: worth 1, and 0 for who never looks at it."""

    def step(place, action, rng):
        if place == 0:
            return 1 + int(rng.integers(6)), 0.0, False, False
        return 7, float(action == place - 1), True, False

    forest = search_of(ScriptedStates(step, 6, stochastic=True), 6, 2000, leaves, rule, discount=0.5)
    assert (root_values(forest, np.arange(4)) > 0.5 * 0.6).all()
    for t in range(4):
        for edge in range(6):
            outcomes, node = [], forest.child[t, 0, edge]
            while node >= 0:
                outcomes.append(int(node))
                node = forest.sibling[t, node]
            assert len(outcomes) == len(set(forest.mark[t, outcomes].tolist())) <= 6
            if forest.n[t, 0, edge] > 200:  # visits are shared out as the dice fell
                share = forest.visits[t, outcomes] / forest.visits[t, outcomes].sum()
                drawn = forest.draws[t, outcomes] / forest.draws[t, outcomes].sum()
                assert abs(share - drawn).max() < 0.05


@pytest.mark.parametrize("leaves", [1, 8])
def test_outcomes_are_bounded_by_visits(leaves):
    def step(place, action, rng):
        return float(rng.normal()), float(rng.normal(0.25)), False, False

    forest = search_of(ScriptedStates(step, 1, stochastic=True), 1, 400, leaves, discount=0.0)
    for t in range(4):
        count, node = 0, forest.child[t, 0, 0]
        while node >= 0:
            count, node = count + 1, forest.sibling[t, node]
        assert count <= np.sqrt(400) + leaves
