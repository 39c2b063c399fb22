"""What every topology does with data and weights, on every runtime."""

import os
import signal
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from helpers.on_runtimes import on_runtimes
from helpers.scaled_agent import Scaled

from corral.acting.policy import ActContext
from corral.acting.sampler import Sampler
from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.envs.make import make_vec
from corral.testing.counting_agent import gaps
from corral.testing.envs import CountingEnv, SlowEnv
from corral.topologies.base import make_topology

COUNTING, ENV = "corral.testing.counting_agent:Counting", "corral.testing.envs:CountingEnv"


def make(algo=COUNTING, env=ENV, notes=None, **settings):
    backend = "auto" if settings.get("topology") == "central_inference" else "local"
    given = {"steps": 4000, "num_envs": 8, "seed": 3, "backend": backend, "device": "cpu"} | settings
    if env == ENV:
        given["env_kwargs"] = {"length": 7, "end": "mixed"}
    experiment = Experiment.make(algo, env, preset="none", overrides=given)
    return make_topology(experiment, lambda kind, text: notes.append((kind, text)) if notes is not None else None)


def run(topology, steps=None, watch=None):
    """Everything that was put into the store, until the run's steps are done."""
    seen, put = [], topology.store.put

    def keep(traj, *more, **named):
        seen.append(traj)
        put(traj, *more, **named)

    topology.store.put = keep
    try:
        while topology.env_steps < (steps or topology.experiment.steps):
            topology.advance()
            if watch is not None:
                watch(topology)
    finally:
        topology.close()
    return seen


RUNTIMES = ["inline", "process"]


@pytest.mark.parametrize(
    ("weights", "runtime"),
    on_runtimes(["sync", "async", "lag:3"], quick={("async", "process"), ("async", "ray")}),
)
def test_no_gap_repeat_or_reorder(weights, runtime):
    topology = make(topology="actor_learner", runtime=runtime, actors=2, weight_sync=weights)
    seen = run(topology)
    assert gaps(seen) == []
    assert {int(i) for traj in seen for i in traj.env_id} == set(range(8))
    ids = {float(i) for traj in seen for i in np.unique(traj.obs[..., 0])}
    assert len(ids) == 8  # eight seeds


@pytest.mark.parametrize(
    ("weights", "runtime"),
    on_runtimes(["sync", "async"], quick={("async", "process")}),
)
def test_no_gap_repeat_or_reorder_with_central_inference(weights, runtime):
    seen = run(make(topology="central_inference", runtime=runtime, actors=2, weight_sync=weights))
    assert gaps(seen) == []
    assert {int(i) for traj in seen for i in traj.env_id} == set(range(8))


def test_gaps_finds_every_defect():
    seen = run(make())
    assert gaps(seen) == []
    assert gaps(seen[:2] + seen[3:])  # a gap
    assert gaps(seen[:3] + seen[2:])  # a repeat
    assert gaps([seen[0], seen[2], seen[1]])  # reordered
    seen[1].obs[2, 0, 3] += 1
    assert gaps(seen)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_lag_0_equals_sync_bit_by_bit_on_the_counting_agent(runtime):
    sync, apart = make(batch_size=8), make(
        topology="actor_learner", runtime=runtime, actors=1, weight_sync="sync", batch_size=8
    )  # fmt: skip
    run(sync), run(apart)
    assert sync.env_steps == apart.env_steps
    assert sync.learner.version == apart.learner.version > 50
    assert torch.equal(sync.learner.flat.weights, apart.learner.flat.weights)


@pytest.mark.parametrize("algo", ["ppo", *(pytest.param(algo, marks=pytest.mark.slow) for algo in ("a2c", "dqn"))])
def test_one_actor_in_step_is_the_topology_sync(algo):
    settings = {"steps": 1500, "weight_sync": "sync"} | ({"learning_starts": 100} if algo == "dqn" else {})
    apart = make(algo, "CartPole-v1", topology="actor_learner", runtime="process", actors=1, **settings)
    del settings["weight_sync"]
    sync = make(algo, "CartPole-v1", **settings)
    run(sync), run(apart)
    assert sync.learner.version == apart.learner.version > 5
    assert torch.equal(sync.learner.flat.weights, apart.learner.flat.weights)
    assert list(sync.episodes.recent) == list(apart.episodes.recent)


def test_several_actors_in_step_are_the_same_run_again():
    both = [make("ppo", "CartPole-v1", topology="actor_learner", runtime=r, actors=2, steps=3000) for r in RUNTIMES]
    for topology in both:
        run(topology)
    assert both[0].metrics()["lag/max"] == 0
    assert torch.equal(both[0].learner.flat.weights, both[1].learner.flat.weights)


@pytest.mark.parametrize("bound", [2, *(pytest.param(bound, marks=pytest.mark.slow) for bound in (0, 5))])
def test_measured_lag_never_exceeds_its_bound(bound):
    lags = []
    topology = make(
        topology="actor_learner", runtime="process", actors=2, max_policy_lag=bound, batch_size=4,
        weight_sync="sync" if bound == 0 else f"lag:{bound}",
    )  # fmt: skip
    get = topology.store.get

    def watched():
        sample = get()
        lags.extend((topology.learner.version - sample.batch.version).tolist())
        return sample

    topology.store.get = watched
    run(topology)
    assert lags
    assert max(lags) <= bound
    assert topology.metrics()["lag/max"] == max(lags)


def test_central_inference_keeps_on_policy_actors_in_step():
    topology = make("ppo", "CartPole-v1", topology="central_inference", runtime="inline", actors=2, steps=3000)
    seen = run(topology)
    assert all(traj.shape[1] == 8 for traj in seen)
    assert topology.metrics()["lag/max"] == 0


def test_sequence_version_is_that_of_its_first_step():
    with make_vec([CountingEnv, SlowEnv], backend="process", workers=2) as vec:
        sampler = Sampler(vec, lambda obs: np.zeros(len(obs), np.int64))
        began = {}
        for number, traj in enumerate(sampler.rollouts(5, first_ready=1)):
            for column, env_id in enumerate(traj.env_id.tolist()):
                assert traj.version[column] == began.get(env_id, 0)
                began[env_id] = number + 1
            sampler.set_context(ActContext(version=number + 1))
            if began.keys() == {0, 1} and number > 20:
                break
        assert began[1] < began[0] or number > 20


def test_an_on_policy_algorithm_is_not_trained_on_stale_data():
    with pytest.raises(UserError, match="weight_sync=sync, or use appo or impala"):
        make("ppo", "CartPole-v1", topology="actor_learner", runtime="inline", weight_sync="async")


@pytest.mark.parametrize("weights", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_killed_actor_comes_back_and_no_step_is_lost(weights):
    notes, killed = [], []
    topology = make(notes=notes, topology="actor_learner", runtime="process", actors=2, steps=8000, weight_sync=weights)

    def kill(topology):
        if len(killed) < 3 and topology.env_steps > 2000 * (len(killed) + 1):
            victim = topology.processes()[len(killed) % 2]
            if victim["pid"]:
                os.kill(victim["pid"], signal.SIGKILL)
                killed.append(victim["pid"])

    seen = run(topology, watch=kill)
    assert len(killed) == 3
    assert [kind for kind, _ in notes].count("lost") == 3
    assert "SIGKILL" in notes[0][1]
    assert topology.metrics()["actors/restarts"] >= 2  # the run may end before the last one is back
    assert gaps(seen) == []
    for pid in killed:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(("learners", "runtime"), on_runtimes([2], quick={(2, "process")}))
def test_no_gap_repeat_or_reorder_with_learners(learners, runtime):
    topology = make(topology="actor_learner", runtime=runtime, actors=1, learners=learners, batch_size=8)
    assert gaps(run(topology)) == []
    assert topology.learner.version > 0


@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("a2c", {}),
        ("a2c", {"normalize_obs": True}),  # statistics of all shares
        ("impala", {"weight_sync": "sync", "batch_size": 8}),  # a sum, not a mean
        (
            "dqn",
            {"weight_sync": "sync", "learning_starts": 100, "prioritized_replay": True, "batch_size": 32, "steps": 800},
        ),
        ("reinforce", {"episodes_per_update": 8, "normalize_advantage": False}),
    ],
)
def test_several_learners_are_one_with_the_whole_batch(algo, settings):
    settings = {"topology": "actor_learner", "runtime": "inline", "actors": 1, "steps": 2000} | settings
    one, two = (make(algo, "CartPole-v1", learners=learners, **settings) for learners in (1, 2))
    for topology in (one, two):
        run(topology, steps=settings["steps"])
    assert one.learner.version == two.learner.version > 3
    torch.testing.assert_close(one.learner.flat.weights, two.learner.flat.weights, rtol=1e-3, atol=1e-5)


@pytest.mark.faults
def test_killed_second_learner_rejoins():
    notes, killed = [], []
    topology = make(
        "a2c", "CartPole-v1", notes, topology="actor_learner", runtime="process", actors=1, learners=3, steps=100_000,
        num_envs=6,
    )  # fmt: skip

    def kill(topology):
        if not killed and topology.learner.version > 50:
            killed.append(topology.processes()[-1]["pid"])
            os.kill(killed[0], signal.SIGKILL)
        if killed and topology.metrics()["learners/restarts"] and len(topology._learner_group._active_peers or []) == 2:
            topology.env_steps = 10**6  # it is back: enough

    run(topology, watch=kill)
    assert [kind for kind, _ in notes].count("lost") == 1
    assert "learner 2" in notes[0][1]


ACTORS = {"topology": "actor_learner", "runtime": "inline", "actors": 2}


@pytest.mark.parametrize(
    "settings",
    [{}, ACTORS, ACTORS | {"learners": 2}, ACTORS | {"topology": "data_parallel"}],
    ids=["sync", "actor_learner", "learners", "data_parallel"],
)
def test_updates_get_the_reward_scale_of_their_batch(settings):
    Scaled.updates.clear()
    topology = make("helpers.scaled_agent:Scaled", normalize_reward=True, **settings)
    run(topology)
    known, true = np.array(Scaled.updates)[-8:].T
    assert (true < 0.2).all()  # returns are many times 1
    np.testing.assert_allclose(known, true, rtol=0.1)


@pytest.mark.parametrize("settings", [{}, ACTORS, ACTORS | {"topology": "central_inference"}])
def test_policies_get_the_reward_scale_of_their_environments(settings):
    seen = run(make("helpers.scaled_agent:Scaled", normalize_reward=True, **settings))
    np.testing.assert_allclose(seen[-1].extras["scale"], seen[-1].reward / seen[-1].raw_reward, rtol=0.1)


def test_batch_not_divisible_by_learners_is_refused():
    with pytest.raises(UserError, match="batch of 7 cannot be split evenly among 2 learners"):
        make("impala", "CartPole-v1", topology="actor_learner", runtime="inline", actors=1, learners=2, batch_size=7)


def test_env_that_cannot_be_built_is_one_line():
    with pytest.raises(UserError, match="NoSuchEnv"):
        make(env="corral.testing.envs:NoSuchEnv", topology="actor_learner", runtime="process")


def test_envs_not_divisible_by_actors_are_refused():
    with pytest.raises(UserError, match="cannot be divided among 3 actors"):
        make(topology="actor_learner", actors=3)


def test_where_the_environments_live_must_fit_the_topology():
    with pytest.raises(UserError, match="runs environments in other processes, and backend=local has none"):
        make(topology="central_inference", backend="local")


def test_numbers_of_parts_that_contradict_each_other_are_refused():
    with pytest.raises(UserError, match="min_actors=5 exceeds the 2 actors"):
        make(topology="actor_learner", actors=2, min_actors=5)
    with pytest.raises(UserError, match="7 environments cannot be divided among 2 actors"):
        make(topology="actor_learner", actors=2, num_envs=7)


def test_sync_has_nothing_to_scale():
    with pytest.raises(UserError, match="has no actors"):
        make(actors=2)
    with pytest.raises(UserError, match="requires a different topology"):
        make(runtime="ray")
    with pytest.raises(UserError, match="learners requires a topology other than 'sync'"):
        make(learners=2)


def test_run_continues_from_its_state():
    first = make(topology="actor_learner", runtime="inline", actors=2, weight_sync="async")
    run(first, steps=2000)
    state = first.state_dict()
    second = make(topology="actor_learner", runtime="inline", actors=2, weight_sync="async")
    assert second.load_state_dict(state) == list(range(8))
    assert second.learner.version == first.learner.version
    run(second)
    assert second.learner.version > first.learner.version


class _Noted(gymnasium.Env):
    """Shows a number that its seed draws, and writes down every one that it starts with."""

    def __init__(self, path):
        self.observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._path = path

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t, start = 0, self.np_random.random(1)
        with open(self._path, "a") as file:
            file.write(f"{start[0]!r}\n")
        return start, {}

    def step(self, action):
        self._t += 1
        return np.zeros(1), 1.0, self._t >= 10, False, {}


@pytest.mark.parametrize("algo", ["impala", "a3c", "dppo"])
def test_resumed_run_plays_new_episodes(algo, tmp_path):
    starts = []
    state = None
    for part in range(2):
        path = tmp_path / f"{part}"
        topology = make(algo, partial(_Noted, str(path)), actors=2, num_envs=4, backend="local", runtime="inline")
        try:
            if state is not None:
                topology.load_state_dict(state)
            until = topology.env_steps + 400
            while topology.env_steps < until:
                topology.advance()
            state = topology.state_dict()
        finally:
            topology.close()
        starts.append(set(path.read_text().split()))
    assert min(map(len, starts)) > 20
    assert not starts[0] & starts[1]
