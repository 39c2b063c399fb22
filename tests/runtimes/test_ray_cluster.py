"""Joining a Ray cluster, starting one, and losing a node of it. Each test has its own cluster, or none."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

import corral
from corral.core.errors import UserError
from corral.runtimes import ray_cluster
from corral.testing.contracts.vec_env import T
from corral.testing.envs import CountingEnv

ray = pytest.importorskip("ray")


@pytest.fixture(autouse=True)
def _no_ray_of_others():
    ray.shutdown()


def step(vec):
    vec.send(np.arange(vec.num_envs), np.zeros(vec.num_envs, np.int64))
    return vec.recv()


def ended(pid, timeout_s=20):
    until = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


def test_address_without_cluster_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match=r"No Ray cluster answers at '127\.0\.0\.1:1'"):
        ray_cluster.connect()


@pytest.mark.linux("backend='ray'", hidden=True)
def test_local_ray_starts_quietly_and_ends_with_program(tmp_path):
    code = """
import corral, psutil
from corral.testing.envs import CountingEnv
vec = corral.make_vec(CountingEnv, 2, "ray")
vec.recv()
print(*[p.pid for p in psutil.Process().children(recursive=True)])
"""
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    pids = [int(word) for word in done.stdout.split()]
    assert pids
    assert all(ended(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.linux("backend='ray'", hidden=True)
def test_lost_node_yields_one_faulty_row(monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    memory = 100 << 20
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "object_store_memory": memory, "_system_config": quick},
    )
    try:
        doomed = cluster.add_node(num_cpus=4, object_store_memory=memory)
        ray_cluster.connect(cluster.address)
        with corral.make_vec(partial(CountingEnv, 0), 4, "ray", workers=4) as vec:
            vec.recv()
            there = np.array([place.node_id == doomed.node_id for place in vec.places])
            assert there.any()
            assert not there.all()
            before = step(vec)
            cluster.remove_node(doomed, allow_graceful=False)
            lost, until = np.zeros(4, int), time.monotonic() + 100
            while (lost < there).any() and time.monotonic() < until:  # an actor may answer once more before it ends
                batch = step(vec)
                np.testing.assert_array_equal(batch.faulty, batch.truncated)
                np.testing.assert_array_equal(batch.next_obs[batch.faulty], before.obs[batch.faulty])
                assert (batch.obs[batch.faulty][:, T] == 0).all()
                lost += batch.faulty
                before = batch
            assert lost.tolist() == there.astype(int).tolist()
            for _ in range(5):
                batch = step(vec)
                assert not batch.faulty.any()
            assert (batch.obs[~there][:, T] > batch.obs[there][:, T].max()).all()  # those went on all the time
            assert doomed.node_id not in [place.node_id for place in vec.places]
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_ray_is_not_imported_with_corral():
    code = "import corral, sys; corral.make_vec; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
