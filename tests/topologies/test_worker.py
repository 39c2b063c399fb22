"""What the workers of one run have of their own, and what they have of each other."""

import copy
import math
import threading
import time

import numpy as np
import pytest

from corral.config.experiment import Experiment
from corral.testing.envs import CountingEnv
from corral.topologies import data_parallel
from corral.topologies.base import make_topology
from corral.topologies.worker import Worker


@pytest.fixture
def workers(monkeypatch):
    """The workers of the runs in this process, by index: the newest of each."""
    made = {}

    class Known(Worker):
        def __init__(self, experiment, host, secret, index, *rest):
            super().__init__(experiment, host, secret, index, *rest)
            made[index] = self

    monkeypatch.setattr(data_parallel, "Worker", Known)
    return made


def make(env="CartPole-v1", **settings):
    given = {
        "steps": 400, "num_envs": 4, "seed": 0, "backend": "local", "device": "cpu", "hidden_sizes": (16,),
        "topology": "data_parallel", "runtime": "inline", "actors": 2,
    } | settings  # fmt: skip
    experiment = Experiment.make("a2c", env, preset="none", overrides=given)
    return make_topology(experiment, lambda kind, text: None)


def go_to(topology, steps):
    while topology.env_steps < steps:
        topology.advance()
    topology._end_turns()


def come_back(topology, crew):
    """Until so many are there, who have met and not begun anything."""
    until = time.monotonic() + 30
    while len(topology._joined) < crew and time.monotonic() < until:
        if topology._needs_rejoin():
            topology._rejoin()
        time.sleep(0.01)
    assert len(topology._joined) == crew


def weights(worker):
    return {name: value.double().numpy() for name, value in worker._sync.learner.state_dict()["model"].items()}


# -- environments -------------------------------------------------------------------------------------------------


class Seeded(CountingEnv):
    """Notes what it draws from the seed that it is first reset with, and in which worker that was."""

    seen: dict[str, list[float]] = {}  # noqa: RUF012 - for all of them

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        if self._life == 0 and seed is not None:
            self.seen.setdefault(threading.current_thread().name, []).append(float(obs[0]))
        return obs, info


def test_no_two_workers_play_the_same_episodes():
    """Nor does one that was started again play those of before. The first plays those of a run without others."""
    Seeded.seen.clear()
    topology = make(env=Seeded, steps=50)
    try:
        topology.advance()
        topology._end_turns()
        before = {name: set(ids) for name, ids in Seeded.seen.items()}
        Seeded.seen.clear()
        for worker in topology._workers:
            topology._mark_lost(worker, "the test says so")
        come_back(topology, 2)
        topology.advance()
        topology._end_turns()
        again = {name: set(ids) for name, ids in Seeded.seen.items()}
    finally:
        topology.close()
    Seeded.seen.clear()
    alone = make(env=Seeded, topology="sync", runtime="auto", actors=None, num_envs=2)
    try:
        alone.advance()
    finally:
        alone.close()
    (others,) = Seeded.seen.values()
    groups = [before["worker 0"], before["worker 1"], again["worker 0"], again["worker 1"]]
    assert [len(ids) for ids in groups] == [2] * 4
    assert len(set().union(*groups)) == 8
    assert set(others) == before["worker 0"]


# -- statistics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["all_reduce", "gossip"])
def test_moments_of_returns_come_to_every_worker(workers, exchange):
    """In a turn each begins with everybody's, and adds its own."""
    topology = make(normalize_reward=True, exchange=exchange)
    try:
        go_to(topology, 400)
        before = copy.copy(topology._returns)
        go_to(topology, topology.env_steps + 1)
        assert before.count >= 350
        new = [worker._returns().since(before) for worker in workers.values()]
        assert [moments.count for moments in new] == [(topology._returns.count - before.count) / 2] * 2
        assert new[0].mean != new[1].mean
        for moments in new:
            before.merge(moments)
    finally:
        topology.close()
    assert before.count == topology._returns.count
    assert float(before.mean) == pytest.approx(float(topology._returns.mean))
    assert float(before.var) == pytest.approx(float(topology._returns.var))


@pytest.mark.parametrize("when", ["joins", "returns"])
def test_late_worker_gets_statistics_of_others(workers, when):
    topology = make(normalize_obs=True, exchange="param_server", mode="async")
    try:
        if when == "returns":
            go_to(topology, 1)
        topology._mark_lost(topology._workers[1], "the test says so")
        topology._workers[1]._due = math.inf
        go_to(topology, topology.env_steps + 300)
        topology._workers[1]._due = 0.0
        come_back(topology, 2)
        first, second = (weights(workers[k]) for k in range(2))
    finally:
        topology.close()
    assert topology._workers[1].restarts == 1
    assert second["encoder.norm.count"] == first["encoder.norm.count"] > 250
    np.testing.assert_array_equal(second["encoder.norm.mean"], first["encoder.norm.mean"])
    np.testing.assert_array_equal(second["encoder.norm.squares"], first["encoder.norm.squares"])


# -- weights ------------------------------------------------------------------------------------------------------


def test_saved_gossip_state_is_mean_of_workers(workers):
    topology = make(exchange="gossip", mode="async", gossip_graph="ring", actors=3, num_envs=6)
    try:
        go_to(topology, 500)
        saved = topology.state_dict()["learner"]["model"]
        told = topology.metrics()["exchange/consensus_distance"]
        parts = [weights(workers[k]) for k in range(3)]
    finally:
        topology.close()
    assert told > 1e-6
    for name, value in saved.items():
        np.testing.assert_allclose(value, np.mean([part[name] for part in parts], axis=0), rtol=1e-5, atol=1e-6)
    assert any(np.abs(parts[0][name] - saved[name].numpy()).max() > 1e-4 for name in saved)
