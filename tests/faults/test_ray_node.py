"""A node of a Ray cluster is lost in the middle of a run."""

import os
import random
import signal
import time

import pytest

from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.runs.events import count_events
from corral.runtimes import ray_cluster
from corral.testing.counting_agent import gaps
from corral.topologies.base import make_topology

QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    before = os.environ.pop("RAY_ADDRESS", None)
    memory = {"object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": QUICK, **memory})
    ray_cluster.connect(made.address)
    yield made
    ray.shutdown()
    made.shutdown()
    if before is not None:
        os.environ["RAY_ADDRESS"] = before


def make(notes, **settings):
    given = {
        "steps": 10**6, "num_envs": 8, "seed": 3, "backend": "local", "device": "cpu", "weight_sync": "async",
        "topology": "actor_learner", "runtime": "ray", "actors": 2, "env_kwargs": {"length": 7, "end": "mixed"},
    }  # fmt: skip
    experiment = Experiment.make(
        "corral.testing.counting_agent:Counting",
        "corral.testing.envs:CountingEnv",
        preset="none",
        overrides=given | settings,
    )
    return make_topology(experiment, lambda kind, text: notes.append((kind, text)))


def advance_until(topology, condition, timeout_s=120):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        topology.advance()


def test_actors_of_a_lost_node_are_started_elsewhere(cluster):
    doomed = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    cluster.wait_for_nodes()
    notes, seen = [], []
    topology = make(notes)
    put = topology.store.put
    topology.store.put = lambda traj, *more, **named: (seen.append(traj), put(traj, *more, **named))
    try:
        advance_until(topology, lambda: topology.env_steps > 2000)
        cluster.remove_node(doomed, allow_graceful=False)
        advance_until(topology, lambda: any(kind == "lost" for kind, _ in notes))
        lost_at = topology.env_steps
        advance_until(
            topology, lambda: topology.metrics()["actors/restarts"] >= 1 and topology.env_steps > lost_at + 2000
        )
        advance_until(topology, lambda: {int(i) for traj in seen[-8:] for i in traj.env_id} == set(range(8)))
    finally:
        topology.close()
    assert gaps(seen) == []


def test_a_run_reaches_its_score_though_a_node_is_lost(cluster, start):
    doomed = cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    cluster.wait_for_nodes()
    run = start("impala", 200_000, words=("--runtime", "ray", "--actors", "2"), RAY_ADDRESS=cluster.address)
    target = random.Random(os.getpid()).randint(3_000, 40_000)
    run.wait_for(lambda: run.steps() >= target)
    cluster.remove_node(doomed, allow_graceful=False)
    assert run.finish() >= 450
    assert count_events(run.path / "events.jsonl")["lost"] >= 1


def test_a_killed_ray_actor_is_started_again(cluster):
    notes, seen = [], []
    topology = make(notes)
    put = topology.store.put
    topology.store.put = lambda traj, *more, **named: (seen.append(traj), put(traj, *more, **named))
    try:
        advance_until(topology, lambda: topology.env_steps > 1000)
        os.kill(topology.processes()[1]["pid"], signal.SIGKILL)
        advance_until(topology, lambda: topology.metrics()["actors/restarts"] == 1)
        back = topology.env_steps
        advance_until(topology, lambda: topology.env_steps > back + 3000)
    finally:
        topology.close()
    assert [kind for kind, _ in notes] == ["lost"]
    assert gaps(seen) == []


def test_asking_for_more_than_the_cluster_has_is_refused_at_once(cluster):
    with pytest.raises(UserError, match="CPUs"):
        make([], actors=8)
