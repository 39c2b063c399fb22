"""Evaluation in the simulators of a run whose slots training has taken."""

import contextlib
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from helpers.json_clients import Client, free_url, vec_of
from helpers.link_steps import steps, steps_on
from helpers.sims import Sim, wait_for
from helpers.sims import free_url as free_tcp_url

import corral
from corral.acting.policy import FunctionPolicy
from corral.config.experiment import Experiment
from corral.core.spaces import Layout
from corral.envs.backends.simulators.options import external_vec_env
from corral.envs.supervision import Supervision
from corral.runs.evaluation.evaluate import evaluate_policy
from corral.runs.evaluation.evaluator import EvaluationStopped, Evaluator
from corral.testing import CountingEnv

SHORT = {"num_steps": 16, "num_minibatches": 1, "eval_every": 128, "eval_episodes": 4, "quiet": True}


@pytest.fixture
def url(sims):
    """A simulator with four slots."""
    url = free_tcp_url()
    sims.append(Sim(partial(CountingEnv, 5), url, bind=True, slots=4))
    wait_for(url)
    return url


def evaluation(url, most):
    return external_vec_env(url, most, None, Supervision(), "eval", {}, fewer=True)


def test_lent_slots_cost_one_faulty_row_each(url):
    with corral.make_vec(url, 4) as vec:
        before = steps(vec, 8)  # three steps into the second episode
        with evaluation(url, 3) as other:
            assert (other.num_envs, other.borrows) == (3, True)
            assert all(batch.terminated.all() == (t % 5 == 4) for t, batch in enumerate(steps(other, 10)))
        after = steps_on(vec, before[-1], 12)
        assert vec.restarts == 0
    assert np.array([batch.faulty for batch in after]).sum(0).tolist() == [1, 1, 1, 0]
    assert after[0].faulty.tolist() == after[0].truncated.tolist() == [True, True, True, False]
    np.testing.assert_array_equal(after[0].final_obs[:3], before[-1].obs[:3])
    for t, batch in enumerate(after[1:]):
        np.testing.assert_array_equal(batch.next_obs[:3, 2], t % 5 + 1)
        np.testing.assert_array_equal(batch.terminated, [t % 5 == 4] * 3 + [t % 5 == 0])


def test_lent_slots_are_waited_for_without_a_deadline(url):
    with corral.make_vec(url, 4, supervision=Supervision(start_timeout_s=0.5)) as vec:
        batch = steps(vec, 2)[-1]
        with evaluation(url, 4) as other:
            vec.send(batch.env_ids, np.zeros(4, np.int64))
            assert not vec.linger(4, 1.5)
            assert other.borrows
        assert vec.recv().faulty.all()


def test_a_stopped_evaluation_gives_its_slots_back(url):
    algo = SimpleNamespace(eval_policy=lambda *args, **kwargs: None)
    topology = SimpleNamespace(experiment=Experiment.make("ppo", url), algo=algo, model=None)
    evaluator = Evaluator(topology, lambda kind, text: None)
    with corral.make_vec(url, 4) as vec:
        batch = steps(vec, 2)[-1]
        with evaluator.interruptible(), contextlib.suppress(EvaluationStopped), evaluator._opened() as other:
            assert other.borrows
            evaluator.interrupt()
        vec.send(batch.env_ids, np.zeros(4, np.int64))
        assert vec.recv().faulty.all()


def test_free_slots_are_taken_first(url):
    with corral.make_vec(url, 3) as vec:
        before = steps(vec, 4)
        with evaluation(url, 3) as other:
            assert (other.num_envs, other.borrows) == (1, False)
        assert not any(batch.faulty.any() for batch in steps_on(vec, before[-1], 6))


def test_run_evaluates_within_the_slots_it_trains_in(sims, tmp_path):
    url = free_tcp_url()
    sims.append(Sim(partial(gymnasium.make, "CartPole-v1"), url, bind=True, slots=4))
    wait_for(url)
    result = corral.train("ppo", url, 512, 0, tmp_path / "run", num_envs=4, **SHORT)
    assert result.steps >= 512
    assert np.isfinite([result.eval_return, result.best_report]).all()


def test_json_run_evaluates_in_its_clients(start, tmp_path):
    url = free_url()
    start(url, partial(gymnasium.make, "CartPole-v1"), 2)
    result = corral.train("ppo", url, 256, 0, tmp_path / "run", num_envs=2, workers=2, **SHORT)
    assert np.isfinite([result.eval_return, result.best_report]).all()


class Unseeded(Client):
    """Accepts no resets."""

    def first(self, seed=None):
        message = super().first(seed)
        del message["seeded"]
        return message


def test_episode_that_had_begun_is_not_evaluated(context, gate):
    fleet = gate(action=Layout(gymnasium.spaces.Discrete(3)))
    client = Unseeded(fleet.binding.urls[0], "one", partial(CountingEnv, 5), context)
    with vec_of(fleet, 1) as vec:
        steps(vec, 2)
        policy = FunctionPolicy(lambda obs: np.zeros(len(obs), np.int64))
        assert evaluate_policy(vec, policy, 3, seed=0).lengths == (5, 5, 5)
    client.join(5)
    assert client.error is None
