"""Simulators that come late, hang, die or lose their connection: no hang, no lost transition."""

import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.link_steps import LIFE, lives, steps, steps_on
from helpers.relay import Relay
from helpers.sims import Sim, free_url, wait_for

import corral
from corral.core.errors import EnvFailed
from corral.link.client import session
from corral.link.protocol import Limits
from corral.testing import CountingEnv, FaultyEnv
from corral.testing.play import play


@pytest.mark.parametrize(
    ("scheme", "later_s"),
    [("tcp", 0.4), ("zmq", 0.4), ("grpc", 0.4), pytest.param("tcp", 10.0, marks=pytest.mark.slow)],
)
def test_learner_may_start_before_simulator(sims, scheme, later_s):
    url = free_url(scheme)
    later = threading.Timer(later_s, lambda: sims.append(Sim(CountingEnv, url, bind=True)))
    later.start()
    with corral.make_vec(url, 2) as vec:  # the simulator finds the learner where it should listen, and dials
        assert len(play(vec, 5)) == 2
    later.join()


def test_listening_server_stays_for_next_learner():
    url = free_url()
    serve = ["-m", "corral.cli.main", "serve", "corral.testing:CountingEnv", "--bind", url]
    process = None
    try:
        for _ in range(2):
            if process is None:
                process = subprocess.Popen([sys.executable, *serve], stderr=subprocess.DEVNULL)
            else:
                wait_for(url)
            with corral.make_vec(url, 2) as vec:
                assert len(play(vec, 5)) == 2
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_server_listens_when_the_learner_it_found_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as learner:
        learner.settimeout(30)
        url = f"tcp://127.0.0.1:{learner.getsockname()[1]}"
        serve = ["-m", "corral.cli.main", "serve", "corral.testing:CountingEnv", "--bind", url]
        process = subprocess.Popen([sys.executable, *serve], stderr=subprocess.DEVNULL)
        try:
            for _ in range(2):  # it looks whether anybody listens, and connects
                learner.accept()[0].close()
            learner.close()
            wait_for(url)
            with corral.make_vec(url, 2) as vec:
                assert len(play(vec, 5)) == 2
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("scheme", ["tcp", "zmq", "grpc"])
def test_simulator_may_start_before_learner(sims, scheme):
    url = free_url(scheme)
    sims.append(Sim(CountingEnv, url))
    time.sleep(0.3)
    with corral.make_vec(url, 2) as vec:
        assert len(play(vec, 5)) == 2
    assert sims[0].exitcode == 0


@pytest.mark.parametrize("scheme", ["tcp", "zmq", "grpc"])
def test_envs_of_killed_simulator_move_to_others(sims, scheme):
    url = free_url(scheme)
    sims += [Sim(partial(CountingEnv, 0), url) for _ in range(2)]
    with corral.make_vec(url, 4, workers=2, env_kwargs={"reconnect_s": 0.5}) as vec:
        before = steps(vec, 10)
        sims[0].kill()
        after = steps_on(vec, before[-1], 30)
    faulty = [env_id for env_id in range(4) if any(b.faulty[env_id] for b in after)]
    assert len(faulty) == 2
    for env_id in range(4):
        seen = lives(before + after, env_id)
        if env_id in faulty:
            at = seen.index(None)
            assert seen[:at] == list(range(1, at + 1))
            assert seen[at + 1 :] == list(range(1, 40 - at))  # a new life elsewhere
            assert after[at - 10].truncated[env_id]
            assert after[at - 10].final_obs[env_id, LIFE] == at
        else:
            assert seen == list(range(1, 41))
    assert {fault.kind for fault in vec.faults} == {"killed", "neighbour"}


def test_restarted_simulator_gets_envs_back_faulty(sims):
    url = free_url()
    sims.append(Sim(partial(CountingEnv, 0), url))
    with corral.make_vec(url, 2, env_kwargs={"reconnect_s": 0.5}) as vec:
        before = steps(vec, 5)
        sims[0].kill()
        sims.append(Sim(partial(CountingEnv, 0), url))
        after = steps_on(vec, before[-1], 10)
    seen = lives(before + after, 0)
    assert seen == [1, 2, 3, 4, 5, None, *range(1, 10)]


@pytest.mark.parametrize("after_bytes", [0, 1, 37, 200, 1001])
def test_cut_connection_resumes_without_repeated_steps(sims, after_bytes):
    url = free_url()
    sims.append(Sim(partial(CountingEnv, 7, "mixed"), url, bind=True))
    relay = Relay(url)
    try:
        with corral.make_vec(relay.url, 3) as vec:
            batches = steps(vec, 20)
            for _ in range(3):
                relay.cut(after_bytes)
                batches += steps_on(vec, batches[-1], 20)
        for env_id in range(3):
            assert lives(batches, env_id) == list(range(1, 81))
        assert vec.restarts == 0
    finally:
        relay.close()


class Nowhere:
    """A wire to nobody."""

    peer, max_bytes = "nobody", 0

    def send(self, frames):
        pass

    def close(self):
        pass


def test_reconnecting_simulator_still_misses_deadline(monkeypatch):
    now = 100.0
    monkeypatch.setattr(session.time, "monotonic", lambda: now)
    simulator = SimpleNamespace(row_bytes=100, layout=1)
    link = session.SimulatorSession(1, simulator, Nowhere(), Limits(), window=4)
    request = link.submit(17, 1, [b""], lambda reply: None, deadline_s=2.0)
    late = []
    for _ in range(3):  # a second here, four away
        now += 1.0
        late.append(link.overdue(now))
        link.detach()
        now += 4.0
        link.attach(Nowhere())
    assert late == [None, request, request]


def test_killed_simulator_is_not_awaited_past_deadline(sims):
    url = free_url()
    sims += [Sim(partial(CountingEnv, 0), url) for _ in range(2)]
    supervision, options = corral.Supervision(step_timeout_s=1.0), {"reconnect_s": 10_000.0}
    with corral.make_vec(url, 4, workers=2, supervision=supervision, env_kwargs=options) as vec:
        before = steps(vec, 5)
        sims[1].kill()
        after = steps_on(vec, before[-1], 5)  # or this would take hours
        assert [fault.kind for fault in vec.faults] == ["killed", "neighbour"]
    assert sum(lives(before + after, e) == list(range(1, 11)) for e in range(4)) == 2


def test_hanging_simulator_is_given_up_at_deadline(sims):
    url = free_url()
    sims.append(Sim(partial(FaultyEnv, "hang"), url))
    with corral.make_vec(url, 1, supervision=corral.Supervision(step_timeout_s=0.5)) as vec:
        vec._timeouts._timeout_s = 0.5  # for another simulator
        with pytest.raises(EnvFailed, match="no simulator"):
            steps(vec, 100)
    assert vec.faults[0].kind == "hung"
    assert "did not answer STEP within 0.5 s" in vec.faults[0].detail


class Moody(CountingEnv):
    """Fails in the reset of every fourth episode that is seeded."""

    seeded = 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            Moody.seeded += 1
            if Moody.seeded % 4 == 0:
                raise RuntimeError("not today")
        return super().reset(seed=seed, options=options)


def test_failing_reset_is_a_fault_and_retried(sims):
    url = free_url()
    sims.append(Sim(partial(Moody, 4), url))
    with corral.make_vec(url, 4) as vec:
        batches = steps(vec, 12)
    assert [fault.kind for fault in vec.faults] == ["raised"]
    assert "not today" in vec.faults[0].detail
    for env_id in range(4):
        assert lives(batches, env_id) == list(range(1, 13))


@pytest.mark.parametrize("kind", ["raise", "nan", "nan_reward", "raise_reset", "exit"])
def test_env_failing_in_simulator_ends_own_episode(sims, kind):
    url = free_url()
    sims.append(Sim(partial(FaultyEnv, kind), url))
    with corral.make_vec(url, 2) as vec:
        batches = steps(vec, 30)
    assert vec.restarts > 0
    faulty = sum(int(b.faulty.sum()) for b in batches)
    assert (faulty > 0) == (kind != "raise_reset")  # a failed reset between episodes costs no row
    for b in batches:
        assert (b.truncated | ~b.faulty).all()
        assert (b.reward[b.faulty] == 0).all()
        good = ~b.faulty
        np.testing.assert_array_equal(b.next_obs[good, 2], b.reward[good])


def test_stopped_simulator_is_given_up(sims):
    url = free_url()
    sims += [Sim(partial(CountingEnv, 0), url) for _ in range(2)]
    supervision = corral.Supervision(step_timeout_s=1.0)
    with corral.make_vec(url, 4, workers=2, supervision=supervision) as vec:
        before = steps(vec, 5)
        sims[1].kill(signal.SIGSTOP)
        after = steps_on(vec, before[-1], 10)
    whole = [e for e in range(4) if lives(before + after, e) == list(range(1, 16))]
    assert len(whole) == 2
