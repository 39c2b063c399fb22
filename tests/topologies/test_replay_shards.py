"""Replay memories in parts of their own."""

import os
import signal
import time

import numpy as np
import pytest

from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.topologies.base import make_topology

SETTINGS = {
    "steps": 20_000, "num_envs": 8, "seed": 3, "backend": "local", "device": "cpu", "topology": "actor_learner",
    "actors": 2, "prioritized_replay": True, "epsilon_ladder": True, "n_step": 3, "learning_starts": 500,
    "batch_size": 32,
    "train_frequency": 8, "buffer_size": 6_000,
}  # fmt: skip


def make(notes=None, **settings):
    experiment = Experiment.make("dqn", "CartPole-v1", preset="none", overrides=SETTINGS | settings)
    return make_topology(experiment, lambda kind, text: notes.append((kind, text)) if notes is not None else None)


def run(topology, steps, watch=lambda topology: None):
    while topology.env_steps < steps:
        topology.advance()
        watch(topology)


@pytest.mark.parametrize(
    ("runtime", "shards"),
    [("inline", 0), ("inline", 2), *(pytest.param("process", count, marks=pytest.mark.slow) for count in (1, 2))],
)
def test_samples_per_insert_are_as_configured_within_a_percent(runtime, shards):
    topology = make(runtime=runtime, replay_shards=shards)
    try:
        run(topology, 6_000)
        idle = 0
        while idle < 100:  # what is available at the moment is bounded by the limiter, and comes in still
            idle = 0 if topology.store.ready() else idle + 1
            topology._learn(topology.store.get(), {}) if not idle else time.sleep(0.01)
        metrics = topology.metrics()
    finally:
        topology.close()
    paid = metrics["store/inserted"] - 500
    assert metrics["store/sampled"] / paid == pytest.approx(32 / 8, rel=0.01)
    assert topology.learner.version == pytest.approx(metrics["store/sampled"] / 32, abs=5)


def test_killed_shard_comes_back_empty():
    notes, killed = [], []
    topology = make(notes, runtime="process", replay_shards=2, actors=1)

    def kill(topology):
        if topology.env_steps > 1500 * (1 + len(killed)) and len(killed) < 2:
            victim = next(part for part in topology.processes() if part["name"] == f"replay {len(killed)}")
            if victim["pid"]:
                os.kill(victim["pid"], signal.SIGKILL)
                killed.append(topology.learner.version)

    try:
        run(topology, 7_000, kill)
        assert topology.learner.version > killed[-1] + 100
        assert topology.metrics()["store/shards"] == 2
        while any(call.method == "put" for member in topology.store.members for call in member.calls):
            topology.store.ready()
        windows = 8 * 2  # of 3 steps, not complete yet, in 8 environments
        assert topology.env_steps - topology.metrics()["store/inserted"] <= windows * (1 + len(killed))
    finally:
        topology.close()
    assert [kind for kind, _ in notes].count("lost") == 2
    assert all("SIGKILL" in text for kind, text in notes if kind == "lost")


def test_shards_are_part_of_the_state():
    first = make(runtime="process", replay_shards=2, actors=1)
    try:
        run(first, 2500)
        state = first.state_dict()
        sizes = first.metrics()["store/size"]
    finally:
        first.close()
    second = make(runtime="process", replay_shards=2, actors=1)
    try:
        second.load_state_dict(state)
        assert second.metrics()["store/size"] >= sizes > 1500
        again = second.store.state_dict()["shards"]
        for k in ("0", "1"):
            for name, value in state["store"]["shards"][k].items():
                if isinstance(value, np.ndarray):
                    np.testing.assert_array_equal(again[k][name], value)
        run(second, 3000)
    finally:
        second.close()


def test_algorithms_without_replay_have_nothing_to_shard():
    overrides = {"topology": "actor_learner", "runtime": "inline", "actors": 1, "replay_shards": 1}
    experiment = Experiment.make("ppo", "CartPole-v1", preset="none", overrides=overrides)
    with pytest.raises(UserError, match="set replay_shards=0"):
        make_topology(experiment, lambda kind, text: None)


def test_a_checkpoint_while_a_shard_dies_leaves_its_part_out():
    topology = make(runtime="process", replay_shards=2, actors=1)
    try:
        while topology.env_steps < 400:
            topology.advance()
        victim = next(part["pid"] for part in topology.processes() if part["name"] == "replay 1")
        os.kill(victim, signal.SIGSTOP)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            topology.advance()  # calls that it does not answer any more
        os.kill(victim, signal.SIGKILL)
        shards = topology.state_dict()["store"]["shards"]
        assert shards["0"] is not None
        assert shards["1"] is None
    finally:
        topology.close()
