"""A policy against an opponent whose moves are made from here: who begins, who wins, and what is refused."""

import numpy as np
import pytest

import corral
from corral.core.errors import UserError
from corral.planning.versus import Versus, read_opponent
from corral.runs.evaluation.evaluate import evaluate_policy

GAME = "corral/TicTacToe-v0"


@pytest.mark.parametrize(("sims", "opponent", "least", "most"), [(200, "random", 0.6, 1), (1, "mcts:300", -1, -0.4)])
def test_a_win_of_the_opponent_counts_as_a_loss(sims, opponent, least, most):
    with corral.make_vec(GAME, 16, "local", role="eval") as vec:
        result = evaluate_policy(vec, Versus(corral.Search(None, sims=sims), opponent, seed=1), 64, 1)
    assert least <= result.mean <= most
    assert set(result.returns) <= {-1.0, 0.0, 1.0}
    assert max(result.lengths) <= 5, "moves of the opponent do not count"


def test_both_sides_begin_in_turn():
    with corral.make_vec(GAME, 8, "local", role="eval") as vec:
        policy = Versus(corral.Search(None, sims=4), "random", seed=1)
        policy.bind_envs(vec)
        batch, state, began = vec.recv(), policy.initial_state(8), []
        for _ in range(60):
            action, state, extras = policy.act(batch.obs, state, batch.first)
            began.extend(zip(batch.env_ids[batch.first], extras["agent"][batch.first], strict=True))
            vec.send(batch.env_ids, action)
            batch = vec.recv()
    for env_id in range(8):
        turns = [agent for at, agent in began if at == env_id]
        assert len(turns) >= 6
        assert all(np.diff(np.array(turns, int)) != 0)
    assert {agent for _, agent in began[:8]} == {True, False}, "who begins the first game is drawn"


@pytest.mark.parametrize("name", ["perfect", "mcts", "mcts:0", "mcts:x", "some_module:player"])
def test_opponents_that_need_the_rules_are_refused(name):
    with pytest.raises(UserError, match="use random or mcts:1000"):
        read_opponent(name)


def test_an_opponent_needs_a_game_of_two():
    with corral.make_vec("CartPole-v1", 1, "local") as vec:
        vec.recv()
        with pytest.raises(UserError, match="one player"):
            Versus(corral.Search(None, sims=2), "random", 0).bind_envs(vec)
