"""What a search must keep to, whatever it searches: signs, ends, noise, legal actions, and that it comes to an end."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.scripted_states import ScriptedStates

from benchmarks.search.playouts import RandomPlayouts
from corral.core.errors import RunFailed, UserError
from corral.envs.suites.games.connect4 import CONNECT4
from corral.planning.action_set import Choices, choose_action_set
from corral.planning.config import SearchConfig
from corral.planning.mcts.evaluation import LeafValues, RolloutEvaluation, uniform_evaluation
from corral.planning.mcts.forest import make_forest
from corral.planning.mcts.gumbel import visits_in_order
from corral.planning.mcts.root import draw_gumbel, gumbel_result, mix_noise, root_values, visit_policy
from corral.planning.mcts.search import TreeSearch
from corral.planning.mcts.selection import Puct, puct_edge
from corral.planning.mcts.tree import plant
from corral.planning.planner import Planner
from corral.planning.search_policy import sharpened

RULES = ("puct", "gumbel")


def worth(value):
    """An evaluation that thinks the same of everything."""
    return lambda obs, legal, ids: uniform_evaluation(obs, legal, ids)._replace(
        values=np.full(len(ids), value, np.float32)
    )


def grown(states, evaluate, roots, width, sims, leaves=1, rule="puct", discount=1.0, scale=1.0, rng=None):
    search = TreeSearch(states, evaluate, len(roots), width, sims, leaves, discount, rng=rng)
    trees = np.arange(len(roots))
    search.plant(trees, roots)
    gumbel = draw_gumbel(search.forest, trees, width, sims, scale, np.random.default_rng(0))
    search.grow(trees, gumbel if rule == "gumbel" else Puct())
    assert not search.forest.inflight.any()
    assert not search.forest.pending.any()
    return search, gumbel


def a_bandit(rewards):
    return ScriptedStates(lambda place, action, rng: (1 + action, rewards[action], True, False), len(rewards))


def test_noise_of_roots_is_another_for_every_root_and_every_seed():
    states = CONNECT4.states()

    def priors(seed):
        search = TreeSearch(states, uniform_evaluation, trees=3, width=7, sims=1)
        search.plant(np.arange(3), states.put(CONNECT4.start(3)))
        mix_noise(search.forest, np.arange(3), 0.3, 0.25, np.random.default_rng(seed))
        np.testing.assert_allclose(search.forest.prior[:, 0].sum(1), 1, rtol=1e-6)
        return search.forest.prior[:, 0].tolist()

    noisy = priors(0) + priors(1)
    assert len({tuple(row) for row in noisy}) == 6
    assert priors(0) == priors(0)

    forest = make_forest(3, 2, 7)
    forest.prior[:] = 1 / 7
    drawn = [draw_gumbel(forest, np.arange(3), 4, 8, 1.0, np.random.default_rng(seed)).noise for seed in (0, 1)]
    assert len({tuple(row) for row in np.concatenate(drawn).tolist()}) == 6


def test_temperature_sharpens_or_flattens_policy():
    forest = make_forest(1, 1, 3)
    forest.n[0, 0] = 10, 20, 70
    shares = {t: sharpened(visit_policy(forest, np.array([0])), t)[0] for t in (0, 0.5, 1, 2)}
    np.testing.assert_allclose(shares[1], [0.1, 0.2, 0.7])
    np.testing.assert_allclose(shares[0.5], np.array([1, 4, 49]) / 54)
    np.testing.assert_allclose(shares[2], np.sqrt([1, 2, 7]) / np.sqrt([1, 2, 7]).sum())
    assert shares[0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("leaves", [1, 8])
def test_no_node_of_a_tree_is_left_by_an_illegal_action(rule, leaves):
    states, rng = CONNECT4.states(), np.random.default_rng(1)
    boards = CONNECT4.start(16)
    for _ in range(24):  # until columns are full
        _, mask = CONNECT4.look(boards)
        after = boards.copy()
        _, over = CONNECT4.move(after, [rng.choice(np.flatnonzero(row)) for row in mask])
        boards = np.where(over[:, None], boards, after)
    search, gumbel = grown(states, RandomPlayouts(states, 0), states.put(boards), 7, 80, leaves, rule)
    forest, full = search.forest, 0
    for t in range(16):
        size = forest.size[t]
        _, legal = CONNECT4.look(states.rows[forest.state[t, :size]])
        full += np.count_nonzero(~legal)
        assert not forest.n[t, :size][~legal].any()
        assert not visit_policy(forest, np.array([t]))[0][~legal[0]].any()
        assert not gumbel_result(forest, np.array([t]), gumbel).policy[0][~legal[0]].any()
    assert full > 100


@pytest.mark.parametrize("rule", RULES)
def test_truncated_leaf_has_value_terminated_none(rule):
    states = ScriptedStates(lambda place, action, rng: (1 + action, 1.0, action == 0, action == 1), 2)
    search, _ = grown(states, worth(10.0), states.put([0]), 2, 20, rule=rule, discount=0.5)
    n, total = search.forest.n[0, 0], search.forest.total[0, 0]
    assert (n > 0).all()
    np.testing.assert_allclose(total / n, [1.0, 1.0 + 0.5 * 10.0])


def test_evaluator_may_return_read_only_arrays():
    values = np.full(1, 3.0)
    values.flags.writeable = False
    states = a_bandit([1.0])
    search, _ = grown(states, lambda obs, legal, ids: LeafValues(np.ones((1, 1)), values), states.put([0]), 1, 4)
    assert search.forest.total[0, 0, 0] == 4.0


def test_single_action_chain_is_discounted_per_step():
    def step(place, action, rng):
        return place + 1, (1.0, 2.0, 4.0)[place], place == 2, False

    for leaves in (1, 8):
        states = ScriptedStates(step, 1)
        search, _ = grown(states, uniform_evaluation, states.put([0]), 1, 10, leaves, discount=0.5)
        returns = [1.0, 1.0 + 0.5 * 2.0] + 8 * [1.0 + 0.5 * 2.0 + 0.25 * 4.0]
        assert search.forest.total[0, 0, 0] == sum(returns)
        assert search.forest.n[0, 0, 0] == 10
        assert root_values(search.forest, np.array([0])) == sum(returns) / 11


@pytest.mark.parametrize("leaves", [1, 4])
def test_value_sign_follows_the_player_to_move(leaves):
    # 0 chooses 1 or 2; in 1 the same player moves again and gets 1, in 2 the other does and gets 1
    def step(place, action, rng):
        return (1 + action, 0.0, False, False) if place == 0 else (3, 1.0, True, False)

    states = ScriptedStates(step, 2, players=2, turn=lambda place: int(place in (2, 3)))
    search, _ = grown(states, uniform_evaluation, states.put([0]), 2, 60, leaves)
    n, total = search.forest.n[0, 0], search.forest.total[0, 0]
    assert n[0] > n[1] > 1
    np.testing.assert_allclose(total, [n[0] - 1, 1 - n[1]])  # but for the first visit, which sees nothing yet


def test_puct_scores_ignore_reward_scale():
    def counts(scale):
        def step(place, action, rng):
            return 10 * place + action, scale * ((7 * place + 3 * action) % 5 - 2), place > 1000, False

        states = ScriptedStates(step, 3)
        return grown(states, worth(scale * 0.5), states.put([1]), 3, 200)[0].forest.n[0, 0].tolist()

    assert counts(1.0) == counts(1024.0) == counts(1 / 1024)


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_rollouts_take_legal_actions_only(discount):
    """All is legal at first, then only action 2, then nothing although the episode goes on: 1 + 2 gamma."""
    taken = []

    def step(place, action, rng):
        taken.append((place, action))
        return place + 1, float(place + 1), False, False

    legal = {0: (0, 1, 2), 1: (2,), 2: ()}
    states = ScriptedStates(step, 3, legal=legal.__getitem__)
    actions = choose_action_set(states.spec.action, 16)
    evaluate = RolloutEvaluation(states, actions, 10, discount, np.random.default_rng(0))
    ids = states.put([0] * 20 + [2])
    views = states.look(ids)
    verdict = evaluate(views.obs, views.legal, ids)
    np.testing.assert_allclose(verdict.values, [1 + 2 * discount] * 20 + [0.0])
    assert all(action in legal[place] for place, action in taken)
    assert {action for place, action in taken if place == 0} == {0, 1, 2}


def test_widened_node_averages_all_edges():
    forest = make_forest(1, 1, 3)
    zeros = np.zeros(1, np.int64)
    plant(forest, zeros, zeros, np.zeros(1, np.int8), np.full((1, 3), 1 / 3, np.float32), np.zeros(1, np.float32))
    forest.n[0, 0], forest.total[0, 0], forest.visits[0, 0] = (1, 0, 2), (0.5, 0.0, -3.0), 4
    forest.low[0], forest.high[0] = -1.5, 0.5
    rule = Puct(c_init=0.01, widen_k=1.0)  # 2 edges for 4 visits: the mean of -2.5 / 4 is no reason to leave the first
    assert puct_edge(forest, 0, 0, rule) == 0


def test_widening_is_bounded_by_visits():
    states = ScriptedStates(lambda place, action, rng: (place + 1, rng.random(), False, False), 32)
    search = TreeSearch(states, uniform_evaluation, 1, 32, 100)
    forest = search.run(states.put([0]), Puct(widen_k=1.0, widen_alpha=0.5))
    for node in range(forest.size[0]):
        tried = np.flatnonzero(forest.n[0, node])
        assert len(tried) <= np.ceil(np.sqrt(forest.visits[0, node]))
        assert tried.tolist() == list(range(len(tried)))
    assert np.count_nonzero(forest.n[0, 0]) == 10


@pytest.mark.parametrize("leaves", [1, 3, 8, 64])
@pytest.mark.parametrize("actions", [1, 2, 5, 8])
def test_sequential_halving_ignores_leaves_in_flight(leaves, actions):
    """Which half goes on is known once all of it has been seen: the better ones, and never before."""
    rewards = np.random.default_rng(actions).permutation(actions) / actions
    states = a_bandit(rewards)
    search, rule = grown(states, uniform_evaluation, states.put([0]), actions, 40, leaves, "gumbel", scale=0.0)
    n = search.forest.n[0, 0]
    order = visits_in_order(actions, 40)
    expected = np.zeros(actions, int)
    for due in order:  # the best of those that are due
        expected[max(np.flatnonzero(expected == due), key=lambda a: rewards[a])] += 1
    np.testing.assert_array_equal(n, expected)
    assert gumbel_result(search.forest, np.array([0]), rule).winner[0] == rewards.argmax()


@pytest.mark.parametrize("leaves", [1, 8])
def test_sequential_halving_waits_for_results(leaves):
    """Rewards come with the second step, so with the second visit of an action; then the better half goes on."""
    rewards = (0.0, 0.2, 0.6, 1.0)

    def step(place, action, rng):
        return (1 + action, 0.0, False, False) if place == 0 else (5, rewards[place - 1], True, False)

    states = ScriptedStates(step, 4)
    search, _ = grown(states, uniform_evaluation, states.put([0]), 4, 16, leaves, "gumbel", scale=0.0)
    assert search.forest.n[0, 0].tolist() == [2, 2, 6, 6]


@pytest.mark.parametrize(("root_selection", "least"), [("gumbel", 0.95), ("puct", 0.5)])
def test_search_value_is_of_the_actions_it_prefers(root_selection, least):
    """One action of 16 pays 1 and all others cost 1. Sequential halving visits those too, which counts for nothing."""
    states = a_bandit([1.0 if action == 8 else -1.0 for action in range(16)])
    config = SearchConfig(root_selection, leaves_in_flight=1)
    planner = Planner(
        states, Choices(states.spec.action), uniform_evaluation, config, 1, 64, discount=1.0,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    plan = planner.plan(np.arange(1), np.ones(1, np.bool_))
    assert plan.best[0] == 8
    assert least < plan.values[0] <= 1.0
    mean = plan.visits[0] @ np.where(np.arange(16) == 8, 1.0, -1.0) / 65  # with the root's own evaluation, 0
    if root_selection == "puct":  # visits follow what is good
        assert plan.values[0] == pytest.approx(mean)
    else:
        assert mean < -0.5


def test_value_of_a_continued_search_is_of_all_its_visits():
    """The second step pays 1 by action 0: known to the tree that continues, even with a single simulation more."""

    def step(place, action, rng):
        return (1 + action, 0.0, False, False) if place == 0 else (3, 1.0 - 2.0 * action, True, False)

    states = ScriptedStates(step, 2)
    states.save = lambda env_ids: states.put([where])
    planner = Planner(
        states, Choices(states.spec.action), uniform_evaluation, SearchConfig(reuse_tree=True), 1, 64, discount=1.0,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    where = 0
    first = planner.plan(np.arange(1), np.ones(1, np.bool_))
    where = 1 + int(first.best[0])
    again = planner.plan(np.arange(1), np.zeros(1, np.bool_), sims=1)
    assert again.visits[0].sum() > 10
    assert min(first.values[0], again.values[0]) > 0.9


def test_search_without_actions_is_an_error():
    states = a_bandit([0.0, 1.0])
    for rule in RULES:
        with pytest.raises(RunFailed, match="not finite"):
            grown(states, worth(np.nan), states.put([0]), 2, 5, rule="gumbel")
        search, gumbel = grown(states, uniform_evaluation, states.put([0]), 2, 5, rule=rule)
        with pytest.raises(UserError, match="trees are full"):
            search.grow(np.array([0]), gumbel)
    stuck = ScriptedStates(lambda place, action, rng: (1, 0.0, False, False), 2, legal=lambda place: ())
    with pytest.raises(UserError, match="no legal action"):
        grown(stuck, uniform_evaluation, stuck.put([0]), 2, 5)


@pytest.mark.parametrize("rule", RULES)
def test_simulations_end_where_no_action_is_legal(rule):
    states = ScriptedStates(
        lambda place, action, rng: (place + 1, 1.0, False, False), 2, legal=lambda place: (0, 1) if place == 0 else ()
    )
    search, _ = grown(states, uniform_evaluation, states.put([0]), 2, 12, 4, rule)
    assert search.forest.n[0, 0].sum() == search.forest.total[0, 0].sum() == 12


def subtree(forest, t, node):
    """Everything that is known of a node and of what is below it."""
    edges = forest.prior[t, node], forest.n[t, node], forest.total[t, node]
    below = [None if c < 0 else subtree(forest, t, c) for c in forest.child[t, node]]
    facts = forest.visits, forest.value, forest.to_play, forest.flags
    return [[array[t, node].item() for array in facts], [edge.tolist() for edge in edges], below]


@pytest.mark.parametrize("leaves", [1, 8])
def test_rerooted_tree_keeps_its_statistics(leaves):
    states, trees = CONNECT4.states(), np.arange(4)
    search = TreeSearch(states, RandomPlayouts(states, 0), 4, 7, 100, leaves, keep=100)
    forest = search.run(states.put(CONNECT4.start(4)), Puct())
    taken = forest.n[:, 0].argmax(1)
    known = [subtree(forest, t, forest.child[t, 0, taken[t]]) for t in trees]
    boards = CONNECT4.start(4)
    CONNECT4.move(boards, taken)
    assert search.reuse(trees, taken, states.put(boards, 1)).all()
    assert [subtree(forest, t, 0) for t in trees] == known
    before = forest.visits[:, 0].copy()
    search.grow(trees, draw_gumbel(forest, trees, 7, 50, 1.0, np.random.default_rng(0)), 50)
    np.testing.assert_array_equal(forest.visits[:, 0], before + 50)
    assert len(np.unique(np.concatenate([forest.state[t, : forest.size[t]] for t in trees]))) == forest.size.sum()


COUNTS = """
import numpy as np
from benchmarks.search.playouts import RandomPlayouts
from corral.envs.suites.games.connect4 import CONNECT4
from corral.planning.action_set import Choices, choose_action_set
from corral.planning.config import SearchConfig
from corral.planning.mcts.selection import Puct
from corral.planning.mcts.root import draw_gumbel
from corral.planning.mcts.search import TreeSearch

states, trees = CONNECT4.states(), np.arange(3)
search = TreeSearch(states, RandomPlayouts(states, 0), 3, 7, 40, 4, keep=40)
for seed in (0, 1):
    for rule in ("puct", "gumbel"):
        forest = search.forest
        search.plant(trees, states.put(CONNECT4.start(3)))
        for _ in range(2):
            gumbel = draw_gumbel(forest, trees, 7, 40, 1.0, np.random.default_rng(seed))
            search.grow(trees, gumbel if rule == "gumbel" else Puct(widen_k=3.0 * seed))
            print(forest.n[:, 0].tolist(), forest.total[:, 0].tolist(), forest.size.tolist())
            taken = forest.n[:, 0].argmax(1)
            boards = CONNECT4.start(3)
            CONNECT4.move(boards, taken)
            search.reuse(trees, taken, states.put(boards, 1))
"""


@pytest.mark.slow
def test_the_kernels_as_plain_python_find_the_same():
    def run(environment):
        done = subprocess.run(
            [sys.executable, "-c", COUNTS], env=dict(os.environ, **environment), capture_output=True, text=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run({"NUMBA_DISABLE_JIT": "1"}) == run({})


def test_sampled_edges_keep_actions_when_rerooted():
    """Reward is the number that was drawn; the second step ends the episode."""
    rng = np.random.default_rng(3)

    def evaluate(obs, legal, ids):
        drawn = rng.uniform(-1, 1, (len(ids), 8, 1))
        return LeafValues(np.full((len(ids), 8), 1 / 8, np.float32), np.zeros(len(ids), np.float32), drawn)

    states = ScriptedStates(lambda place, action, dice: (place + 1 + action[0], action[0], place > 1, False), 8)
    search = TreeSearch(states, evaluate, 2, 8, 60, 4, keep=60)
    forest = search.run(states.put([0.0, 0.5]), Puct())
    for t in range(2):
        for node in range(1, forest.size[t]):
            drawn = search.actions[t, forest.parent[t, node], forest.in_edge[t, node], 0]
            assert forest.reward[t, node] == np.float32(drawn)
    taken = forest.n[:, 0].argmax(1)
    moved = search.actions[np.arange(2), 0, taken, 0]
    assert (moved == search.actions[:, 0, :, 0].max(1)).all()
    below = [search.actions[t, forest.child[t, 0, taken[t]]].copy() for t in range(2)]
    roots = states.put([0.0 + 1 + moved[0], 0.5 + 1 + moved[1]])
    assert search.reuse(np.arange(2), taken, roots).all()
    np.testing.assert_array_equal(search.actions[:, 0], below)
