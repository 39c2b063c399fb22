"""Searches where steps are random: values are means over outcomes, not of one that the search happens to know."""

import numpy as np
import pytest
from helpers.reference import search as literal
from helpers.scripted_states import ScriptedStates

from corral.planning.mcts.evaluation import LeafValues, uniform_evaluation
from corral.planning.mcts.gumbel import Gumbel
from corral.planning.mcts.root import draw_gumbel, root_values
from corral.planning.mcts.search import TreeSearch
from corral.planning.mcts.selection import Puct

PAYS = (0.3, 0.6, 0.5)


def pull(place, arm, rng):
    """A slot machine, one pull."""
    return 1, float(rng.random() < PAYS[arm]), True, False


def search_of(states, width, sims, leaves, rule=None, rng=True, discount=1.0, start=0):
    search = TreeSearch(
        states, uniform_evaluation, 4, width, sims, leaves, discount, rng=np.random.default_rng(5) if rng else None
    )
    trees = np.arange(4)
    search.plant(trees, states.put([start] * 4))
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


def lottery(steps):
    """A ticket costs 0.75 and wins 1 with probability 0.5: drawn when it is bought, shown some steps later."""

    def step(place, action, rng):
        at, ticket = place
        if at == 0:
            return ((9, 0), 0.0, True, False) if action == 0 else ((1, int(rng.random() < 0.5)), -0.75, False, False)
        if at == steps:
            return (8, ticket), float(ticket), True, False
        return (at + 1, ticket), 0.0, False, False

    return ScriptedStates(step, 2, stochastic=True, shown=lambda place: place[0])


@pytest.mark.parametrize("leaves", [1, 4])
@pytest.mark.parametrize("rule", [Puct, Gumbel])
@pytest.mark.parametrize("steps", [1, 3])
def test_what_was_drawn_but_not_shown_is_not_known(leaves, rule, steps):
    forest = search_of(lottery(steps), 2, 600, leaves, rule, start=(0, 0))
    value = forest.total[:, 0, 1] / forest.n[:, 0, 1]
    assert (forest.n[:, 0, 1] > 50).all()
    assert abs(value + 0.25).max() < 4 * 0.5 / np.sqrt(forest.n[:, 0, 1].min())


def hidden_bits(place, action, rng):
    """Three steps; each shows what the hidden bit of the step before was, and draws another."""
    at, shown, bit = place
    reward = float(bit == action) - 0.25 * action
    return (at + 1, 4 * (3 * shown + action) % 11 + bit, int(rng.integers(2))), reward, at == 2, False


def open_dice(place, action, rng):
    """Everything is shown."""
    at, shown, _ = place
    return (at + 1, 5 * shown + 2 * action + int(rng.integers(2)), 0), 0.1 * (shown % 3) - 0.05 * action, at == 2, False


def look(place):
    return 100 * place[1] + place[0]


def guess(shown):
    """Some network."""
    return {a: (1.0 + (shown * (a + 1)) % 3) / 6 for a in range(2)}, 0.1 * ((7 * shown) % 5)


@pytest.mark.parametrize("rule", [Puct, Gumbel])
@pytest.mark.parametrize(("step", "newest"), [
    (hidden_bits, True), (open_dice, True), pytest.param(open_dice, False, marks=pytest.mark.slow),
])  # fmt: skip
def test_counts_with_chance_equal_plain_search(step, newest, rule):
    """Whether an outcome stays where it was first drawn makes no difference if everything is shown."""
    states, sims = ScriptedStates(step, 2, stochastic=True, shown=look), 200

    def evaluate(obs, legal, ids):
        guessed = [guess(int(shown)) for shown in obs[:, 0]]
        priors = np.array([[float(p) for p in priors.values()] for priors, _ in guessed], np.float32)
        return LeafValues(priors, np.array([value for _, value in guessed], np.float32))

    def literal_evaluate(shown):
        priors, value = guess(shown)
        return {a: float(np.float32(p)) for a, p in priors.items()}, float(np.float32(value))

    for seed in range(20):
        search = TreeSearch(states, evaluate, 1, 2, sims, rng=np.random.default_rng(seed))
        start, dice, one = (0, seed % 4, seed % 2), np.random.default_rng(seed), np.arange(1)

        def throw(place, action, dice=dice):
            place, reward, over, _ = step(
                place, action, np.random.default_rng(int(dice.integers(1, 2**63, 1, np.uint64)[0]))
            )
            return place, look(place), float(np.float32(reward)), over

        search.plant(one, states.put([start]))
        gumbel = draw_gumbel(search.forest, one, 2, sims, 1.0, np.random.default_rng(seed))
        forest = search.grow(one, gumbel if rule is Gumbel else Puct())
        tree = literal.ChanceTree(start, look(start), throw, literal_evaluate, newest=newest)
        choose = literal.gumbel(gumbel.noise[0], gumbel.order[0]) if rule is Gumbel else literal.puct()
        done = 0
        while done < sims:
            done += tree.simulate(choose)
        np.testing.assert_array_equal(forest.n[0, 0], literal.counts(tree, 2))
        np.testing.assert_allclose(forest.total[0, 0], list(tree.root.w.values()), rtol=1e-5)
