"""Runs of workers that share what they learn, on every runtime and with every exchange."""

import functools
import os
import signal

import pytest
import torch
from helpers.on_runtimes import on_runtimes

import corral
from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.learn.exchange.base import find_exchange
from corral.learn.exchange.config import DataParallelConfig
from corral.topologies.base import make_topology

EXCHANGES = {
    "all_reduce": {},
    "all_reduce topk": {"compress": "topk:0.05"},
    "all_reduce powersgd": {"compress": "powersgd:2"},
    "all_reduce bf16": {"compress": "bf16"},
    "server sync": {"exchange": "param_server"},
    "server sync, shards": {"exchange": "param_server", "servers": 2},
    "server async": {"exchange": "param_server", "mode": "async"},
    "server lag": {"exchange": "param_server", "mode": "ssp:2", "compress": "qsgd:8", "quantize_weights": True},
    "gossip sync": {"exchange": "gossip"},
    "gossip async": {"exchange": "gossip", "mode": "async", "gossip_graph": "ring"},
    "gossip lag": {"exchange": "gossip", "mode": "ssp:1", "quantize_weights": True},
}
EQUAL_STEPS = 600  # 60 updates of A2C, three rollouts of PPO
SYNC = [name for name in EXCHANGES if not {"async", "lag"} & set(name.split()) and "gossip" not in name]


def make(algo="a2c", notes=None, **settings):
    given = {
        "steps": 3000,
        "num_envs": 4,
        "seed": 5,
        "backend": "local",
        "device": "cpu",
        "hidden_sizes": (16,),
    } | settings
    experiment = Experiment.make(algo, "CartPole-v1", preset="none", overrides=given)
    return make_topology(experiment, lambda kind, text: notes.append((kind, text)) if notes is not None else None)


def run(topology, watch=lambda topology: None):
    """Train to the end; the learner's state and the metrics."""
    try:
        while topology.env_steps < topology.experiment.steps:
            topology.advance()
            watch(topology)
        return topology.state_dict()["learner"], topology.metrics()
    finally:
        topology.close()


def weights(state):
    return {name: torch.as_tensor(value) for name, value in state["model"].items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def settings_of(algo):
    return {"normalize_reward": True, "normalize_obs": True} | ({"anneal_lr": True} if algo == "ppo" else {})


@functools.cache
def weights_of_sync(algo):
    return weights(run(make(algo, num_envs=2, steps=EQUAL_STEPS, **settings_of(algo)))[0])


@pytest.mark.parametrize("algo", ["a2c", "ppo"])
@pytest.mark.parametrize("name", [name for name in EXCHANGES if "quantize_weights" not in EXCHANGES[name]])
def test_single_worker_equals_sync(name, algo):
    exchange = dict(EXCHANGES[name])
    if exchange.get("exchange") == "param_server":
        exchange.pop("compress", None)  # to a server, gradients are compressed by one worker as well
    state, _ = run(make(
        algo, num_envs=2, steps=EQUAL_STEPS, topology="data_parallel", runtime="inline", actors=1, **exchange,
        **settings_of(algo),
    ))  # fmt: skip
    assert equal(weights(state), weights_of_sync(algo))


@pytest.mark.parametrize(
    ("name", "runtime"),
    on_runtimes(
        ["all_reduce", "server async", "gossip sync"],
        quick={("all_reduce", "process")},  # the example in docs/data_parallel.md is a server on processes
    ),
)
def test_runs_finish_on_every_runtime(name, runtime):
    topology = make(topology="data_parallel", runtime=runtime, actors=2 if name != "server async" or runtime != "ray"
                    else 1, **EXCHANGES[name])  # fmt: skip
    state, metrics = run(topology)
    assert topology.env_steps >= 3000
    assert topology.episodes.finished > 10
    assert state["version"] > 50
    assert metrics["workers/restarts"] == 0


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_finishes_and_reports_bytes(name):
    def watch(topology):
        if not seen:
            seen.append(
                {w: topology._ask([w], "state", [[]], 20)[w] for w in topology._end_turns() or topology._joined}
            )

    seen = []
    topology = make(topology="data_parallel", runtime="inline", actors=2, steps=1000, **EXCHANGES[name])
    state, metrics = run(topology, watch)
    assert metrics["exchange/bytes_per_update"] > 0
    assert all(torch.isfinite(value).all() for value in weights(state).values())
    if name in SYNC:
        one, other = (weights(state) for state in seen[0].values())
        assert equal(one, other)


@pytest.mark.parametrize("algo", ["reinforce", "dqn"])
@pytest.mark.parametrize("name", ["all_reduce", "all_reduce topk", "server sync", "gossip sync"])
def test_workers_with_uneven_data_do_not_deadlock(name, algo):
    settings = (
        {"learning_starts": 200, "train_frequency": 8, "batch_size": 16}
        if algo == "dqn"
        else {"episodes_per_update": 3}
    )
    state, _ = run(make(algo, topology="data_parallel", runtime="inline", actors=2, **EXCHANGES[name], **settings))
    assert state["version"] > 20


@pytest.mark.parametrize("name", ["all_reduce", "server sync"])
def test_statistics_are_of_all_workers(name):
    settings = {"normalize_obs": True, "normalize_reward": True}
    topology = make(topology="data_parallel", runtime="inline", actors=2, **EXCHANGES[name], **settings)
    state, _ = run(topology)
    count = float(state["model"]["encoder.norm.count"])
    assert count == pytest.approx(topology.env_steps, abs=40)  # moments of the last batch may be on their way
    assert topology._returns.count >= topology.env_steps - 4 * 8


def test_synchronous_runs_are_the_same_every_time():
    """Compare two runs, with schedules that depend on the steps so far."""
    settings = {"topology": "data_parallel", "runtime": "inline", "actors": 3, "num_envs": 6, "anneal_lr": True}
    settings["steps"] = 1600
    first, _ = run(make("ppo", **settings))
    second, _ = run(make("ppo", **settings))
    assert equal(weights(first), weights(second))
    other, _ = run(make("ppo", **settings, seed=6))
    assert not equal(weights(first), weights(other))


LATER = pytest.mark.faults  # `make faults`: each takes a quarter of a minute


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("all_reduce", marks=pytest.mark.slow),
        *(pytest.param(n, marks=LATER) for n in ("server sync", "server async", "gossip sync", "gossip async")),
    ],
)
def test_a_killed_worker_is_left_out_and_comes_back(name):
    notes, killed = [], []

    def watch(topology):
        if not killed and topology.env_steps > 1000:
            killed.append(topology.processes()[1]["pid"])
            os.kill(killed[0], signal.SIGKILL)
        if killed and topology.metrics()["workers/restarts"] and len(topology._joined) == 2:
            topology.env_steps = max(topology.env_steps, 100_000)  # enough seen

    topology = make(
        topology="data_parallel", runtime="process", actors=2, steps=100_000, notes=notes, **EXCHANGES[name]
    )
    run(topology, watch)
    assert [kind for kind, _ in notes].count("lost") == 1


@pytest.mark.faults
@pytest.mark.parametrize(
    "name", ["server async", *(pytest.param(n, marks=LATER) for n in ("server sync, shards", "server lag"))]
)
def test_killed_server_continues_from_last_state(name):
    notes, killed, versions = [], [], []

    def watch(topology):
        versions.append(topology._rendezvous._last[0]["version"] if topology._rendezvous._last[0] else 0)
        if not killed and topology.env_steps > 5000:
            topology._rendezvous.keep()
            killed.append(topology.processes()[-1]["pid"])
            versions.append(topology._rendezvous._last[-1]["version"])
            os.kill(killed[0], signal.SIGKILL)
        if killed and topology._rendezvous.members[-1].restarts and not topology._rejoin_needed:
            topology._rendezvous.keep()
            versions.append(topology._rendezvous._last[-1]["version"])
            topology.env_steps = 100_000

    topology = make(
        topology="data_parallel", runtime="process", actors=2, steps=100_000, notes=notes, **EXCHANGES[name]
    )
    state, _ = run(topology, watch)
    assert [kind for kind, _ in notes].count("lost") == 1
    assert versions[-1] >= versions[-2] > 50  # it did not begin anew
    assert all(torch.isfinite(value).all() for value in weights(state).values())


def test_with_too_few_workers_the_rest_wait():
    notes = []
    topology = make(
        topology="data_parallel", runtime="inline", actors=2, notes=notes, exchange="param_server", mode="async",
        min_actors=2, steps=50_000,
    )  # fmt: skip
    try:
        while topology.env_steps < 500:
            topology.advance()
        topology._end_turns()
        topology._workers[1].restarts = 3  # so that it is not started again at once
        topology._mark_lost(topology._workers[1], "the test says so")
        for _ in range(3):
            topology.advance()
        waiting = topology.env_steps
        for _ in range(5):
            topology.advance()
        assert topology.env_steps == waiting
        assert "waiting" in [kind for kind, _ in notes]
    finally:
        topology.close()


def test_dead_worker_does_not_hide_state_of_others():
    topology = make(topology="data_parallel", runtime="inline", actors=2)
    try:
        while topology.env_steps < 500:
            topology.advance()
        topology._end_turns()
        topology._workers[0]._handle.stop()
        assert topology._rendezvous.state(topology._joined) is not None
        assert topology._joined == topology._workers[1:]
    finally:
        topology.close()


@pytest.mark.parametrize("name", ["all_reduce", "server async", "gossip async"])
def test_worker_dying_in_rendezvous_is_left_out(name):
    topology = make(topology="data_parallel", runtime="inline", actors=2, steps=100_000, **EXCHANGES[name])
    try:
        topology._workers[1]._handle.stop()
        topology.advance()
        assert topology._joined == topology._workers[:1]
        while topology.env_steps < 100_000 and len(topology._joined) < 2:
            topology.advance()
        assert topology._joined == topology._workers
        assert topology._workers[1].restarts == 1
    finally:
        topology.close()


def test_resumed_run_keeps_learned_weights():
    topology = make(topology="data_parallel", runtime="inline", actors=2, steps=2000)
    try:
        while topology.env_steps < 1000:
            topology.advance()
        saved = topology.state_dict()
    finally:
        topology.close()
    again = make(topology="data_parallel", runtime="inline", actors=2, steps=2000)
    try:
        assert again.load_state_dict(saved) == [0, 1, 2, 3]
        again._rejoin()
        state = again._rendezvous.state(again._joined)
        assert equal(weights(state), weights(saved["learner"]))
        assert state["version"] == saved["learner"]["version"]
    finally:
        again.close()
    assert again.env_steps == saved["env_steps"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"exchange": "gossip", "compress": "topk:0.01"}, "gossip sends weights, not gradients"),
        ({"exchange": "param_server", "compress": "powersgd:2"}, "needs exchange=all_reduce"),
        ({"compress": "zip"}, "use none, fp16"),
        ({"exchange": "param_server", "mode": "ssp:-1"}, "must be sync, async or ssp:K"),
        ({"mode": "lag"}, "must be sync, async or ssp:K"),
        ({"mode": "async"}, "needs exchange=param_server or gossip"),
        ({"actors": 100, "num_envs": 100}, "100 workers are too many for the"),
        ({"actors": 3}, "cannot be divided among 3"),
        ({"backup_workers": 1}, "backup_workers needs exchange=param_server"),
        ({"exchange": "param_server", "backup_workers": 2}, "must be below the 2 workers"),
        ({"servers": 2}, "servers needs exchange=param_server"),
        ({"gossip_graph": "ring"}, "needs exchange=gossip"),
        ({"quantize_weights": True}, "sends no weights"),
        ({"compress_momentum": 0.9}, "needs compress=topk"),
        ({"exchange": "param_server", "servers": 50}, "2 workers and 50 servers are too many"),
        ({"learners": 2}, "learners does not apply to data_parallel"),
        ({"topology": "sync", "actors": None, "compress": "sign"}, "compress needs topology=data_parallel"),
    ],
    ids=str,
)
def test_invalid_combinations_are_refused(settings, says):
    with pytest.raises(UserError, match=says) as caught:
        make(**({"topology": "data_parallel", "runtime": "process", "actors": 2} | settings))
    assert "\n" not in str(caught.value)


def test_own_exchange_by_module_and_class(tmp_path):
    settings = {"num_envs": 4, "hidden_sizes": (8, 8), "quiet": True, "preset": "none", "eval_episodes": 0}
    result = corral.train(
        "dppo", "CartPole-v1", 2048, 1, tmp_path / "run", actors=2, runtime="inline", num_steps=32,
        exchange="helpers.own_exchange:LocalSgd", **settings,
    )  # fmt: skip
    assert result.version > 20
    assert "bytes_per_update" in (tmp_path / "run" / "metrics.csv").read_text()


def test_unknown_exchange_is_refused_in_one_sentence():
    with pytest.raises(UserError, match=r"must be all_reduce, param_server, gossip or module:Class"):
        DataParallelConfig(exchange="ring")
    with pytest.raises(UserError, match=r"No exchange 'helpers.own_exchange:Missing'"):
        find_exchange("helpers.own_exchange:Missing")
