"""The binding zmq+json://: clients that drive the loop behind the same VecEnv, and what they may do wrong."""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq
from gymnasium import spaces
from helpers.json_clients import ANYWHERE, free_url, url_of, vec_of

import corral
from corral.link.client.fleet import Fleet
from corral.link.transports.json_router import JsonBinding
from corral.testing import CountingEnv, VecEnvContract
from corral.testing.contracts.vec_env import ID, LIFE
from corral.testing.play import play

CLIENTS = Path(__file__).parents[2] / "sdk" / "json"


class TestContract(VecEnvContract):
    slow_tests = r".*\[1048576\]"

    @pytest.fixture(autouse=True)
    def _clients(self, start):
        self._start = start

    def make(self, factory, num_envs, seed=0):
        fleet = Fleet(JsonBinding(listen=ANYWHERE))
        self._start(url_of(fleet), factory, num_envs)
        vec = vec_of(fleet, num_envs)
        vec.seed = seed
        return vec

    # As JSON a byte takes up to four, and seconds to write and read where the suite goes up to 64 MB: users of such
    # observations want the link.
    @pytest.mark.parametrize("nbytes", [1 << 10, (1 << 16) + 1, 1 << 20])
    def test_observations_of_any_size(self, nbytes):
        super().test_observations_of_any_size(nbytes)


def test_sixteen_clients_play_at_once(start):
    url = free_url()
    start(url, partial(CountingEnv, 5, "mixed"), 16)  # before anybody listens
    with corral.make_vec(url, 16, workers=16) as vec:
        rows = play(vec, 100, min_ready=4)
    assert all([row.next_obs[LIFE] for row in r] == list(range(1, 101)) for r in rows)
    assert len({r[0].obs[ID] for r in rows}) == 16


# -- the clients that users start from -------------------------------------------------------------------------


def test_the_python_client_plays_and_leaves():
    _play_cartpole([sys.executable, str(CLIENTS / "client.py")])


def test_the_cpp_client_compiles_and_plays(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = str(tmp_path / "client")
    wheel = next(Path(zmq.__file__).parents[1].glob("pyzmq.libs/libzmq*.so*"), None)
    link = ["-lzmq"] if wheel is None else [f"-L{wheel.parent}", f"-l:{wheel.name}", f"-Wl,-rpath,{wheel.parent}"]
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", str(CLIENTS / "client.cpp"), "-o", program, *link]
    built = subprocess.run(command, capture_output=True, text=True)
    if "-lzmq" in built.stderr:
        pytest.skip("no libzmq to link with")
    assert built.returncode == 0, built.stderr
    _play_cartpole([program])


def test_a_learner_starts_clients_and_ends_them():
    command = f"{sys.executable} {CLIENTS / 'client.py'} {{url}}"
    with corral.make_vec("zmq+json://127.0.0.1:0", 2, env_kwargs={"sim": command, "sims": 2}) as vec:
        launcher = vec.fleet.members[0].joined.__self__
        assert all(process.session is not None for process in launcher._processes)
        assert len(play(vec, 20)) == 2
        processes = [process.popen for process in launcher._processes]
    assert [process.returncode for process in processes] == [0, 0]


def _play_cartpole(command):
    """A client leaves after three episodes and another takes over, until the run is over; both end well."""
    url = free_url()
    dialled = url.replace("zmq+json", "tcp")
    clients = [subprocess.Popen([*command, dialled, "short", "3"])]
    try:
        with corral.make_vec(url, 1) as vec:
            clients.append(subprocess.Popen([*command, dialled]))
            (rows,) = play(vec, 300)
            first = vec.reset(11) or vec.recv().obs
            again = vec.reset(11) or vec.recv().obs
            np.testing.assert_array_equal(first, again)
        assert [client.wait(10) for client in clients] == [0, 0]
    finally:
        for client in clients:
            client.kill()
            client.wait()
    assert vec.spec.action_space == spaces.Discrete(2)
    (fault,) = [k for k, row in enumerate(rows) if row.faulty]
    assert sum(row.terminated for row in rows[:fault]) == 3
    for row in rows[:fault] + rows[fault + 1 :]:
        assert row.reward == 1
        assert row.terminated == bool(abs(row.next_obs[0]) > 2.4 or abs(row.next_obs[2]) > 0.2095)
        assert (abs(row.following) <= 0.05).all() or not row.terminated or row is rows[fault - 1]
