"""What only the Ray backend does; the contract it shares with the others is in tests/contracts."""

import os
import signal
import subprocess
import time
from functools import partial

import numpy as np
import psutil
import pytest
from helpers.on_runtimes import RAY_BACKEND

import corral
from corral.core.errors import UserError
from corral.testing.contracts.vec_env import LIFE, T
from corral.testing.envs import BigEnv, CountingEnv, SlowEnv
from corral.testing.play import play

pytest.importorskip("ray")
pytestmark = RAY_BACKEND


def step(vec, ids=None):
    ids = np.arange(vec.num_envs) if ids is None else np.array(ids)
    vec.send(ids, np.zeros(len(ids), np.int64))
    return vec.recv()


def ended(pid, timeout_s=20):
    until = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


class WaitsForFile(CountingEnv):
    """Its steps take as long as a file does not exist."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    def step(self, action):
        while not os.path.exists(self._path):
            time.sleep(0.01)
        return super().step(action)


class HangsAtThird(CountingEnv):
    def step(self, action):
        result = super().step(action)
        if result[0][LIFE] == 3:
            time.sleep(1000)
        return result


@pytest.mark.parametrize("workers", [1, 3])
def test_transitions_are_those_of_the_local_backend(workers):
    with corral.make_vec("CartPole-v1", 5, "local", seed=3) as vec:
        expected = play(vec, 60)
    with corral.make_vec("CartPole-v1", 5, "ray", workers=workers, seed=3) as vec:
        actual = play(vec, 60)
    for a, b in zip(expected, actual, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x.next_obs, y.next_obs)
            np.testing.assert_array_equal(x.following, y.following)
            assert (x.reward, x.terminated, x.truncated) == (y.reward, y.terminated, y.truncated)


def test_slow_env_does_not_delay_env_of_same_actor(tmp_path):
    gate = tmp_path / "open"
    envs, supervision = [CountingEnv, partial(WaitsForFile, str(gate))], corral.Supervision(step_timeout_s=20)
    with corral.make_vec(envs, backend="ray", workers=1, supervision=supervision) as vec:
        batch = vec.recv()
        vec.send(batch.env_ids, np.zeros(2, np.int64))
        assert vec.recv(min_ready=1).env_ids.tolist() == [0]
        assert not vec.restarts  # it came because it was ready, not because the other took too long
        gate.touch()
        assert vec.recv().env_ids.tolist() == [1]


def test_killed_actor_yields_one_faulty_row():
    with corral.make_vec(partial(CountingEnv, 0), 4, "ray", workers=2) as vec:
        vec.recv()
        step(vec)
        before = step(vec)
        pid = vec.places[0].pid
        os.kill(pid, signal.SIGKILL)
        batch = step(vec)
        assert batch.faulty.tolist() == batch.truncated.tolist() == [True, False, True, False]
        np.testing.assert_array_equal(batch.next_obs[[0, 2]], before.obs[[0, 2]])  # the last good ones
        assert batch.obs[:, T].tolist() == [0, 3, 0, 3]
        batch = step(vec)
        assert not batch.faulty.any()
        assert batch.obs[:, T].tolist() == [1, 4, 1, 4]
        assert vec.places[0].pid != pid
        assert [(f.env_id, f.kind) for f in vec.faults] == [(0, "killed"), (2, "neighbour")]


def test_hanging_env_of_an_actor_is_named():
    supervision = corral.Supervision(step_timeout_s=1.0)
    envs = [CountingEnv, HangsAtThird, CountingEnv]
    with corral.make_vec(envs, backend="ray", workers=1, supervision=supervision) as vec:
        vec.recv()
        faulty = [step(vec).faulty.tolist() for _ in range(3)]
        assert faulty == [[False] * 3, [False] * 3, [True] * 3]  # cheap steps travel, and are lost, together
        fault = next(fault for fault in vec.faults if fault.kind == "hung")
        assert fault.env_id == 1
        assert "test_ray_backend.py" in fault.detail  # the stack


def test_more_workers_than_cpus_are_refused_with_remedy():
    with pytest.raises(UserError, match=r"workers=9 needs 9 CPUs and the Ray cluster has 4: ask for at most 4.*nodes"):
        corral.make_vec(CountingEnv, 9, "ray", workers=9)


def test_busy_cpus_are_named_and_evaluation_needs_none():
    with corral.make_vec(CountingEnv, 4, "ray", workers=4):
        with pytest.raises(UserError, match=r"needs 1 CPUs on the Ray cluster: 0 of its 4 CPUs are free; .*fewer"):
            corral.make_vec(CountingEnv, 1, "ray", workers=1)
        with corral.make_vec(CountingEnv, 1, "ray", workers=1, role="eval") as vec:
            assert len(vec.recv()) == 1


def test_closing_ends_actors_and_their_processes():
    vec = corral.make_vec(_StartsAProcess, 2, "ray", workers=2)
    children = vec.recv().obs[:, 0].astype(int).tolist()
    pids = [place.pid for place in vec.places]
    assert all(psutil.pid_exists(pid) for pid in pids + children)
    vec.close()
    vec.close()
    assert all(ended(pid) for pid in pids + children)


class _StartsAProcess(CountingEnv):
    """Shows the id of a process that it started and will not end."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self._child = subprocess.Popen(["sleep", "1000"])
        obs = obs.copy()
        obs[0] = self._child.pid
        return obs, info


def test_read_results_leave_the_object_store():
    import ray

    def objects():
        return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())

    with corral.make_vec(partial(BigEnv, 1 << 20), 2, "ray", workers=2) as vec:
        vec.recv()
        for _ in range(5):
            step(vec)
        before = objects()
        for _ in range(40):
            step(vec)
        assert objects() <= before + 4


def test_state_saved_on_ray_continues_locally():
    with corral.make_vec("CartPole-v1", 3, "ray", workers=2, seed=1) as vec:
        vec.record_episodes()
        vec.recv()
        for _ in range(15):
            step(vec)
        state = vec.state_dict()
        expected = [step(vec).obs for _ in range(5)]
    with corral.make_vec("CartPole-v1", 3, "local", seed=9) as vec:
        assert vec.load_state_dict(state) == []
        for obs in expected:
            np.testing.assert_array_equal(step(vec).obs, obs)


def test_unpicklable_factory_is_refused():
    import threading

    lock = threading.Lock()
    with pytest.raises(UserError, match="cannot be sent to a worker"):
        corral.make_vec(lambda: (lock, CountingEnv())[1], 1, "ray")


@pytest.mark.ray
def test_envs_that_wait_share_cpus_on_ray():
    """Ray has 4 CPUs here."""
    with corral.make_vec(partial(SlowEnv, 0.02, 0.03), 8, "ray") as vec:
        assert len(vec.places) == 8
        assert "8 actors with" in vec.backend_reason
        assert len(vec.recv()) == 8
    with corral.make_vec(CountingEnv, 6, "ray", workers=6, worker_cpus=0.25) as vec:
        assert len(vec.places) == 6
        assert len(vec.recv()) == 6
    with pytest.raises(corral.UserError, match=r"needs 12 CPUs .* ask for at most 4"):
        corral.make_vec(CountingEnv, 6, "ray", workers=6, worker_cpus=2)


@pytest.mark.parametrize("backend", ["local", "process", "auto"])
def test_worker_cpus_need_ray(backend):
    with pytest.raises(corral.UserError, match="for backend='ray' only"):
        corral.make_vec(CountingEnv, 2, backend, worker_cpus=0.5)
