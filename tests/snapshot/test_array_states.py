"""Environments that are a function of rows."""

import gymnasium
import numpy as np
import pytest
from helpers.row_cartpole import make

import corral
from corral.core.errors import UserError
from corral.snapshot.array_states import ArrayStates, has_rows


@pytest.fixture
def vec():
    with corral.make_vec(make, 4, "local", seed=3) as made:
        made.recv()
        yield made


def test_an_environment_that_says_so_is_kept_by_row(vec):
    assert isinstance(vec.states(), ArrayStates)
    assert not has_rows(gymnasium.make("CartPole-v1"))
    assert not has_rows(gymnasium.wrappers.FrameStackObservation(make(), 2))


def test_what_comes_of_an_expansion_is_what_the_environment_does(vec):
    states, rng = vec.states(), np.random.default_rng(0)
    for _ in range(200):
        actions = rng.integers(2, size=4)
        ids = states.save(np.arange(4))
        steps = states.expand(ids, actions, states.new_ids(4))
        vec.send(np.arange(4), actions)
        batch = vec.recv()
        np.testing.assert_array_equal(steps.obs, batch.next_obs)
        np.testing.assert_array_equal(steps.terminated, batch.terminated)
        np.testing.assert_array_equal(steps.reward, batch.reward)
        states.drop(np.concatenate([ids, steps.children]))


def test_a_time_limit_is_kept_and_restored():
    with corral.make_vec(lambda: gymnasium.wrappers.TimeLimit(make().env, 10), 1, "local") as vec:
        vec.recv()
        for _ in range(7):
            vec.send(np.arange(1), np.array([_ % 2]))
            assert not vec.recv().truncated[0]
        states = vec.states()
        root = states.save(np.arange(1))
        ends = []
        ids = root
        for t in range(3):
            steps = states.expand(ids, np.array([(7 + t) % 2]), states.new_ids(1))
            ids = steps.children
            ends.append(bool(steps.truncated[0]))
        assert ends == [False, False, True]
        rolled = states.rollout(root, np.array([[1, 0, 1, 0, 1]]))
        assert rolled.length.tolist() == [3]
        assert rolled.truncated.tolist() == [True]
        states.load(root, np.arange(1))
        for t in range(3):
            vec.send(np.arange(1), np.array([(7 + t) % 2]))
            assert bool(vec.recv().truncated[0]) == (t == 2)


def test_rollouts_are_expansions_one_after_the_other(vec):
    states, rng = vec.states(), np.random.default_rng(1)
    roots, actions = states.save(np.arange(4)), rng.integers(2, size=(4, 40))
    rolled = states.rollout(roots, actions)
    for i in range(4):
        ids, rewards = roots[i : i + 1], []
        for t in range(40):
            steps = states.expand(ids, actions[i : i + 1, t], states.new_ids(1))
            rewards.append(steps.reward[0])
            ids = steps.children
            if steps.terminated[0]:
                break
        assert rolled.length[i] == len(rewards)
        np.testing.assert_array_equal(rolled.reward[i, : len(rewards)], rewards)
        np.testing.assert_array_equal(rolled.obs[i], steps.obs[0])


def test_memory_is_bounded_and_the_sentence_says_what_to_do(vec):
    states = vec.states(memory_mb=0.1)

    def fill():
        for _ in range(10_000):
            states.save(np.arange(4))

    with pytest.raises(UserError, match="memory_mb"):
        fill()
