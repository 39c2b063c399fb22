"""Actors whose rewards are normalised share one scale, also after a restart and a resume."""

import os
import signal
from collections import deque

import numpy as np
import pytest

from corral.config.experiment import Experiment
from corral.envs.make import make_vec
from corral.envs.normalize import NormalizedVecEnv
from corral.topologies.base import make_topology
from corral.topologies.shared_returns import ActorReturns, LearnerReturns

SETTINGS = {
    "steps": 20_000, "num_envs": 8, "seed": 3, "backend": "local", "device": "cpu", "topology": "actor_learner",
    "actors": 2, "normalize_reward": True,
}  # fmt: skip


def make(algo="impala", env="Pendulum-v1", **settings):
    experiment = Experiment.make(algo, env, preset="none", overrides=SETTINGS | settings)
    return make_topology(experiment, lambda kind, text: None)


def run(topology, steps):
    while topology.env_steps < steps:
        topology.advance()


def scales(topology):
    return np.array([*topology._learning_scales.values()])


def test_every_return_is_counted_once_with_fragments_in_flight():
    rng = np.random.default_rng(0)
    learner, returns = LearnerReturns(), []
    with make_vec("CartPole-v1", 1, "local") as one, make_vec("CartPole-v1", 1, "local") as two:
        vecs = [NormalizedVecEnv(vec, obs=False) for vec in (one, two)]
        actors = [ActorReturns(vec, shared=True) for vec in vecs]
        requests, answers = [deque(), deque()], [deque(), deque()]
        for _ in range(400):
            k, kind = rng.integers(2), rng.integers(3)
            if kind == 0 and len(requests[k]) + len(answers[k]) < 2:
                requests[k].append(learner.for_actor(str(k)))
            elif kind == 1 and requests[k]:
                actors[k].begin(requests[k].popleft())
                rows = rng.normal(k, 1 + k, rng.integers(0, 5))
                returns.append(rows)
                vecs[k].statistics.returns.update(rows)
                answers[k].append(actors[k].end())
            elif kind == 2 and answers[k]:
                learner.take(str(k), answers[k].popleft())
        for k in range(2):
            for answer in answers[k]:
                learner.take(str(k), answer)
            actors[k].begin(learner.for_actor(str(k)))
    rows = np.concatenate(returns)
    for moments in (learner.all, *(vec.statistics.returns for vec in vecs)):
        assert moments.count == len(rows)
        assert moments.mean == pytest.approx(rows.mean())
        assert moments.var == pytest.approx(rows.var())


def test_actors_have_one_scale_and_keep_it_on_resume():
    first = make(runtime="inline")
    try:
        run(first, 6_000)
        before, state = scales(first), first.state_dict()
    finally:
        first.close()
    np.testing.assert_allclose(before, before.mean(), rtol=0.1)
    second = make(runtime="inline")
    try:
        second.load_state_dict(state)
        assert second.reward_scale == pytest.approx(before.mean(), rel=0.1)
        run(second, second.env_steps + 400)
        np.testing.assert_allclose(scales(second), before.mean(), rtol=0.1)
    finally:
        second.close()


def test_restarted_actor_takes_over_the_scale():
    topology = make(runtime="process", actors=1)
    try:
        run(topology, 4_000)
        before = scales(topology)[0]
        os.kill(topology.processes()[0]["pid"], signal.SIGKILL)
        run(topology, topology.env_steps + 800)
        assert topology.metrics()["actors/restarts"] == 1
        assert scales(topology)[0] == pytest.approx(before, rel=0.2)
    finally:
        topology.close()


def test_actor_that_is_lost_for_good_has_no_say_in_the_scale():
    topology = make("dqn", env="CartPole-v1", runtime="process", max_restarts=0, learning_starts=100, batch_size=8)
    try:
        while len(topology._scales) < 2:
            topology.advance()
        topology._scales["actor 1"] = topology._learning_scales["actor 1"] = 50.0  # of its first few returns
        os.kill(topology.processes()[1]["pid"], signal.SIGKILL)
        while topology.processes()[1]["alive"]:
            topology.advance()
        run(topology, topology.env_steps + 100)
        assert topology.reward_scale == scales(topology)[0] == topology.store._ctx.reward_scale
    finally:
        topology.close()
