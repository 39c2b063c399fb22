"""`corral serve --connect`: environments elsewhere that crash, hang, are spare, and outlive a learner."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from helpers.served import Served
from helpers.sims import free_url

import corral
from corral import Supervision
from corral.core.errors import EnvFailed
from corral.core.machine import Backoff
from corral.envs.serve import server as serving
from corral.envs.serve.supervisor import RequestClock
from corral.link.address import parse_url
from corral.link.transports.open import open_binding
from corral.testing import CountingEnv
from corral.testing.contracts.vec_env import T

SCHEMES = ["tcp", "zmq", "grpc"]
COUNTING = "corral.testing:CountingEnv"


@pytest.fixture
def serve():
    """Start `corral serve`; whatever a test does, it is ended."""
    started = []

    def start(env, url, *options):
        started.append(Served(env, url, *options))
        return started[-1]

    yield start
    for served in started:
        served.end()


def step(vec, ids=None):
    ids = np.arange(vec.num_envs) if ids is None else np.array(ids)
    vec.send(ids, np.zeros(len(ids), np.int64))
    return vec.recv(env_ids=ids)


def wait_until(happens, timeout_s=20):
    until = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_killed_process_is_replaced(serve, scheme):
    url = free_url(scheme)
    served = serve(COUNTING, url)
    with corral.make_vec(url, 3) as vec:
        vec.recv()
        before = step(vec)
        (worker,) = served.workers()
        worker.kill()
        batch = step(vec)
        assert batch.faulty.all()
        assert batch.truncated.all()
        np.testing.assert_array_equal(batch.next_obs, before.obs)  # the last good ones
        assert batch.obs[:, T].tolist() == [0] * 3
        assert [fault.kind for fault in vec.faults] == ["killed", "neighbour", "neighbour"]
        assert not step(vec).faulty.any()
    assert served.wait() == 0
    assert "ended with signal SIGKILL; starting another" in served.text


@pytest.mark.parametrize(
    ("kind", "words"), [("kill", "ended with signal SIGKILL"), ("hang", "did not answer before its deadline")]
)
def test_environment_that_crashes_or_hangs_is_started_again(serve, kind, words):
    url = free_url()
    served = serve("corral.testing:FaultyEnv", url, "--env-kwargs", f"kind={kind}")
    with corral.make_vec(url, 1, supervision=Supervision(step_timeout_s=0.5)) as vec:
        vec.recv()
        faulty = [bool(step(vec).faulty[0]) for _ in range(12)]
        assert faulty.count(True) >= 1
        assert faulty.count(False) >= 8
    text = served.text
    assert words in text
    assert ("FaultyEnv" in text or "envs.py" in text) or kind == "kill"  # the stack of a hang


def test_environment_that_never_starts_is_given_up(serve):
    served = serve("helpers.faulty_envs:DiesAtStart", free_url())
    assert served.wait(60) == 1
    assert "failed 5 times before it had answered a request, the last time it ended with exit code 7" in served.text


def test_unknown_environment_is_refused_in_one_sentence(serve):
    served = serve("CartPol-v1", free_url())
    assert served.wait() == 2
    assert "No environment 'CartPol-v1'. Close: CartPole" in served.text
    assert served.text.count("\n") == 1


def test_spare_takes_over_from_a_frozen_server(serve):
    url = free_url()
    first = serve(COUNTING, url, "--envs", 1)
    with corral.make_vec(url, 1, supervision=Supervision(step_timeout_s=0.5)) as vec:
        vec.recv()
        (worker,) = first.workers()
        serve(COUNTING, url, "--envs", 1)
        wait_until(lambda: vec.linger(2, 0.05) or len(vec.fleet.sessions) == 2)
        worker.suspend()
        assert step(vec).faulty.all()
        assert [fault.kind for fault in vec.faults] == ["hung"]
        assert not step(vec).faulty.any()
        worker.resume()  # so that it ends at once


def test_environments_wait_for_a_late_server_while_others_step(serve):
    url = free_url()
    servers = [serve(COUNTING, url, "--envs", 2, "--env-kwargs", "length=0") for _ in range(2)]
    with corral.make_vec(url, 4, workers=2, env_kwargs={"reconnect_s": 0.2}) as vec:
        vec.recv()
        step(vec)
        servers[0].kill()
        vec.send(np.arange(4), np.zeros(4, np.int64))
        going = vec.recv(min_ready=2)
        assert len(going) == 2
        for _ in range(5):
            assert not step(vec, going.env_ids).faulty.any()
        serve(COUNTING, url, "--envs", 2)
        lost = np.setdiff1d(np.arange(4), going.env_ids)
        batch = vec.recv(env_ids=lost)
        assert batch.faulty.all()
        assert batch.obs[:, T].tolist() == [0, 0]
        assert not step(vec).faulty.any()


def test_run_ends_in_words_when_no_server_comes_back(serve):
    url = free_url()
    served = serve(COUNTING, url)
    with corral.make_vec(url, 1, env_kwargs={"reconnect_s": 0.2}) as vec:
        vec.recv()
        vec._timeouts._timeout_s = 0.6
        served.kill()
        with pytest.raises(EnvFailed, match=r"1 environments have no simulator at .* after 1 s; start them"):
            step(vec)


def test_learner_without_simulators_says_so():
    with pytest.raises(EnvFailed, match=r"0 of 1 simulators are connected at tcp://127.0.0.1:\d+ after [01] s; start"):
        corral.make_vec(free_url(), 1, supervision=Supervision(start_timeout_s=0.5))


def test_workers_serve_until_the_run_is_over_and_leave_nothing(serve):
    url = free_url()
    served = serve("CartPole-v1", url, "--workers", 2)
    with corral.make_vec(url, 2, workers=2) as vec:
        assert len(vec.recv()) == 2
        family = psutil.Process(served.process.pid).children(recursive=True)
        assert len(served.workers()) == 2
    assert served.wait() == 0
    assert psutil.wait_procs(family, 10)[1] == []


def test_killed_serve_leaves_nothing(serve):
    url = free_url()
    served = serve(COUNTING, url)
    with corral.make_vec(url, 1) as vec:
        vec.recv()
        family = psutil.Process(served.process.pid).children(recursive=True)
        served.kill()
        assert psutil.wait_procs(family, 10)[1] == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_serve_returns_to_a_restarted_learner(serve, scheme):
    url = free_url(scheme)
    served = serve("CartPole-v1", url)
    code = f"import corral; vec = corral.make_vec({url!r}, 1); vec.recv(); print('up', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as learner:  # fmt: skip
        assert learner.stdout.readline() == b"up\n"
        learner.kill()
    with corral.make_vec(url, 1) as vec:
        assert len(vec.recv()) == 1
    assert served.wait() == 0


def test_serve_gives_up_without_a_learner(serve):
    served = serve(COUNTING, free_url(), "--patience", 0.3)
    assert served.wait() == 1
    assert "No learner at tcp://127.0.0.1" in served.text


def test_learner_that_says_nothing_is_left(monkeypatch):
    monkeypatch.setattr(serving, "_HANDSHAKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = parse_url(f"tcp://127.0.0.1:{door.getsockname()[1]}")
        server = serving.SimulatorServer(CountingEnv, "counting", open_binding("tcp", connect=[address]), 1)
        with contextlib.closing(server):
            server.poll(0.1)
            connection = door.accept()[0]
            until = time.monotonic() + 5
            while server._greetings and time.monotonic() < until:
                server.poll(0.05)
            assert not server._greetings
            assert b"no handshake within 0.2 s" in connection.recv(1 << 16)
            connection.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "Give either --bind"),
        (["--connect", "nowhere"], "nowhere"),
        (["--connect", "tcp://a:1", "--workers", "0"], "--workers must be at least 1"),
        (["--bind", "tcp://127.0.0.1:0", "--workers", "2"], "cannot listen at one address"),
        (["--connect", "tcp://a:1", "--patience", "x"], "--patience must be a number"),
        (["--connect", "tcp://a:1", "--token-file", "/none"], "The token file /none cannot be read"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(options, words, capsys):
    from corral.cli.main import main

    assert main(["serve", "CartPole-v1", *options]) == 2
    text = capsys.readouterr().err
    assert words in text
    assert text.count("\n") == 1


def test_interrupt_says_goodbye(serve):
    url = free_url()
    served = serve(COUNTING, url)
    with corral.make_vec(url, 1) as vec:
        vec.recv()
        os.kill(served.process.pid, signal.SIGTERM)
        wait_until(lambda: vec.linger(2, 0.05) or not vec.fleet.sessions)
    assert served.wait() == 143


def test_request_clock_counts_what_is_late():
    clock = RequestClock()
    assert clock.overdue_s() == 0.0
    clock.begin(0.01)
    time.sleep(0.05)
    assert clock.overdue_s() > 0.02
    clock.end()
    assert (clock.overdue_s(), clock.answered) == (0.0, 1)
    clock.begin(0.0)  # without a deadline
    assert clock.overdue_s() == 0.0
    clock.wait(0.01)  # the server must wait for messages again within this time
    time.sleep(0.05)
    assert clock.overdue_s() > 0.02


def test_backoff_doubles_up_to_its_longest_pause():
    backoff = Backoff(0.1, 0.5)
    assert [backoff.next() for _ in range(4)] == pytest.approx([0.1, 0.2, 0.4, 0.5])
    backoff.reset()
    assert backoff.next() == pytest.approx(0.1)
    noisy = Backoff(1.0, 1.0, jitter=0.3)
    pauses = [noisy.next() for _ in range(50)]
    assert 0.7 <= min(pauses) < max(pauses) <= 1.0
