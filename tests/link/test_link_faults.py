"""Simulators that come late, hang, die, lose their connection, or talk nonsense: no hang, no lost transition."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from helpers.relay import Relay
from helpers.sims import Sim, free_url, wait_for

import corral
from corral.core.errors import EnvFailed, UserError
from corral.envs.backends.simulators import slots as link_slots
from corral.link import layout
from corral.link.client import session
from corral.link.message import BadMessage, Message
from corral.link.protocol import Limits
from corral.testing import CountingEnv, FaultyEnv, OneStateEnv, SlowEnv
from corral.testing.play import play

LIFE = 3


@pytest.fixture
def sims():
    running = []
    yield running
    for sim in running:
        sim.end()


def steps(vec, count, actions=3):
    """Step everybody so many times; all batches."""
    rng, batch, batches = np.random.default_rng(0), vec.recv(), []
    for _ in range(count):
        vec.send(batch.env_ids, rng.integers(actions, size=len(batch)))
        batch = vec.recv()
        batches.append(batch)
    return batches


def lives(batches, env_id):
    """Which steps of its life an environment has delivered, and where a fault was."""
    return [None if b.faulty[env_id] else int(b.next_obs[env_id, LIFE]) for b in batches]


@pytest.mark.parametrize(
    ("scheme", "later_s"),
    [("tcp", 1.5), ("zmq", 1.5), ("grpc", 1.5), pytest.param("tcp", 10.0, marks=pytest.mark.slow)],
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


@pytest.mark.parametrize("scheme", ["tcp", "zmq", "grpc"])
def test_simulator_may_start_before_learner(sims, scheme):
    url = free_url(scheme)
    sims.append(Sim(CountingEnv, url))
    time.sleep(1.0)
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


def steps_on(vec, batch, count, actions=3):
    batches = []
    for _ in range(count):
        vec.send(batch.env_ids, np.zeros(len(batch), np.int64))
        batch = vec.recv()
        batches.append(batch)
    return batches


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

    peer, most_bytes = "nobody", 0

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
    supervision = corral.Supervision(step_timeout_s=1.0, start_timeout_s=3.0)
    started = time.monotonic()
    with corral.make_vec(url, 1, supervision=supervision) as vec, pytest.raises(EnvFailed, match="no simulator"):
        steps(vec, 100)
    assert time.monotonic() - started < 60
    assert vec.faults[0].kind == "hung"
    assert "did not answer STEP within 1 s" in vec.faults[0].detail


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


def test_slow_simulator_hands_over_envs_at_episode_end(sims, monkeypatch):
    monkeypatch.setattr(link_slots, "_BALANCE_S", 0.2)
    url = free_url()
    for pause_s in (0.001, 0.01):
        sims.append(Sim(partial(SlowEnv, pause_s, pause_s, length=10), url))
    with corral.make_vec(url, 8, workers=2) as vec:
        batches = steps(vec, 60)
        quick, slow = sorted(vec.fleet.sessions.values(), key=lambda session: session.row_s)
        assert quick.seated + slow.seated == 8
        assert slow.seated <= 2  # it would have one of eleven steps if seats were divisible
    ends = [np.flatnonzero(b.terminated) for b in batches]
    assert sum(map(len, ends)) == 8 * 6  # nobody's episode was cut or joined on the way
    assert not any(b.faulty.any() or b.truncated.any() for b in batches)


def test_a_late_joiner_takes_a_share_when_episodes_end(sims):
    url = free_url()
    sims.append(Sim(partial(CountingEnv, 5), url))
    with corral.make_vec(url, 4) as vec:
        batches = steps(vec, 8)
        sims.append(Sim(partial(CountingEnv, 5), url))
        until = time.monotonic() + 30
        while len(vec._fleet.sessions) < 2 and time.monotonic() < until:
            batches += steps_on(vec, batches[-1], 1)
        batches += steps_on(vec, batches[-1], 20)
        assert sorted(s.seated for s in vec._fleet.sessions.values()) == [2, 2]
    assert not any(b.faulty.any() for b in batches)
    for b in batches:  # no episode was cut or joined on the way
        np.testing.assert_array_equal(b.next_obs[:, 2], b.reward)
        np.testing.assert_array_equal(b.terminated, b.reward == 5)
        assert (b.obs[b.terminated][:, 2] == 0).all()


class Shy(CountingEnv):
    """Fails in the first resets that a learner asks for."""

    seeded = 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            Shy.seeded += 1
            if 1 < Shy.seeded <= 3:  # the very first is a look at what it can do
                raise RuntimeError("not yet")
        return super().reset(seed=seed, options=options)


def test_episode_end_arrives_though_next_start_fails(sims):
    url = free_url()
    sims.append(Sim(partial(CountingEnv, 5), url))
    with corral.make_vec(url, 4) as vec:
        batches = steps(vec, 3)
        sims.append(Sim(partial(Shy, 5), url))
        until = time.monotonic() + 30
        while not vec.restarts and time.monotonic() < until:
            batches += steps_on(vec, batches[-1], 1)
        batches += steps_on(vec, batches[-1], 10)
    assert "not yet" in vec.faults[0].detail
    for b in batches:
        np.testing.assert_array_equal(b.next_obs[:, 2], b.reward)
        np.testing.assert_array_equal(b.terminated, b.reward == 5)
        np.testing.assert_array_equal(b.first, b.terminated)


def test_envs_stay_in_leaving_simulator_until_replaced(sims):
    url = free_url()
    sims.append(Sim(partial(CountingEnv, 5), url))
    with corral.make_vec(url, 2) as vec:
        batches = steps(vec, 3)
        (session,) = vec.fleet.sessions.values()
        session.retiring = True
        vec._rebalancer.plan(vec._sessions)
        batches += steps_on(vec, batches[-1], 12)
        assert session.seated == 2
        sims.append(Sim(partial(CountingEnv, 5), url))
        until = time.monotonic() + 30
        while session.seated and time.monotonic() < until:
            batches += steps_on(vec, batches[-1], 1)
        assert session.seated == 0
    for b in batches:
        assert not b.faulty.any()
        np.testing.assert_array_equal(b.terminated, b.reward == 5)


def test_closed_vec_env_frees_its_slots(sims):
    url = free_url()
    sims.append(Sim(partial(CountingEnv, 5), url, slots=4))
    with corral.make_vec(url, 2) as vec:
        batches = steps(vec, 3)
        (session,) = vec.fleet.sessions.values()
        for _ in range(3):
            with corral.make_vec(url, 2) as other:
                batch = other.recv()
                assert session.seated == 4
                other.send(batch.env_ids, np.zeros(2, np.int64))  # under way when it is closed
            batches += steps_on(vec, batches[-1], 5)
            assert session.seated == 2


def test_32_simulators_at_once(sims):
    url = free_url()
    sims += [Sim(partial(CountingEnv, 5), url, slots=2) for _ in range(32)]
    with corral.make_vec(url, 64, workers=32) as vec:
        for rows in play(vec, 20):
            assert [row.next_obs[LIFE] for row in rows] == list(range(1, 21))


def test_other_spaces_are_refused_with_difference(sims, caplog):
    url = free_url()
    sims.append(Sim(CountingEnv, url))
    with corral.make_vec(url, 1) as vec:
        vec.recv()
        other = Sim(OneStateEnv, url)
        sims.append(other)
        until = time.monotonic() + 20
        while "was refused" not in caplog.text and time.monotonic() < until:
            vec.send(np.array([0]), np.array([0]))
            vec.recv()
        assert "where others have" in caplog.text
        assert other.exitcode == 1  # with the same words on its stderr


def test_a_token_is_required_of_both_sides_and_never_sent(sims, tmp_path, caplog):
    good, bad = tmp_path / "token", tmp_path / "other"
    good.write_text("0123456789abcdef0123456789abcdef\n")
    bad.write_text("fedcba9876543210fedcba9876543210\n")
    url = free_url()
    sims += [Sim(CountingEnv, url, token_file=str(bad)), Sim(CountingEnv, url)]
    sims.append(Sim(CountingEnv, url, token_file=str(good)))
    with corral.make_vec(url, 2, env_kwargs={"token_file": str(good)}) as vec:
        assert len(play(vec, 5)) == 2
        assert len(vec._fleet.sessions) == 1
    assert sims[0].exitcode == 1
    assert "0123456789abcdef" not in caplog.text


def test_listening_for_other_machines_needs_a_token_or_insecure():
    with pytest.raises(UserError, match="token"):
        corral.make_vec("tcp://0.0.0.0:0", 1)


@pytest.mark.parametrize("bad", ["tcp://host", "tcp://host:99999", "http://127.0.0.1:80", "tcp://a b:1"])
def test_invalid_address_is_refused(bad):
    with pytest.raises(UserError, match=r"HOST:PORT|not one of"):
        corral.make_vec(bad, 1)


def test_more_envs_than_simulator_slots_are_refused(sims):
    url = free_url()
    sims.append(Sim(CountingEnv, url, bind=True, slots=2))
    wait_for(url)
    with pytest.raises(UserError, match="at most 2 environments"):
        corral.make_vec(url, 4)


GARBAGE = {
    "nothing of the protocol": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "a huge length": b"CLP1" + struct.pack("<II", 1, 0xFFFFFFFF),
    "many frames": b"CLP1" + struct.pack("<I", 100_000),
    "an empty header": b"CLP1" + struct.pack("<II", 1, 0),
    "noise": os.urandom(4096),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_strangers_that_talk_nonsense_do_not_disturb_the_others(sims, what):
    url = free_url()
    sims.append(Sim(partial(CountingEnv, 0), url))
    host, port = url.partition("://")[2].split(":")
    with corral.make_vec(url, 2) as vec:
        before = steps(vec, 5)
        strangers = [socket.create_connection((host, int(port))) for _ in range(5)]
        for stranger in strangers:
            stranger.sendall(GARBAGE[what])
        batches = before + steps_on(vec, before[-1], 50)
        assert lives(batches, 0) == list(range(1, 56))
        for stranger in strangers:
            stranger.settimeout(15)
            while stranger.recv(1 << 16):  # an error, then the end
                pass
            stranger.close()


HUGE = {"type": "box", "dtype": "uint8", "shape": [1 << 27], "low": 0, "high": 255}
SMALL = {"type": "discrete", "n": 2, "start": 0, "dtype": "int64"}


@pytest.mark.parametrize(
    "space",
    [
        {"type": "tuple", "spaces": [HUGE] * 3},
        {"type": "dict", "spaces": [[str(k), {"type": "tuple", "spaces": [SMALL] * 200}] for k in range(200)]},
        {"type": "multi_binary", "n": [1 << 20, 1 << 20]},
    ],
    ids=["parts that are too large together", "too many leaves together", "too many bits"],
)
def test_a_space_that_is_too_large_is_refused_before_it_is_built(space, monkeypatch):
    monkeypatch.setattr(layout.Layout, "from_json", lambda data: pytest.fail("it was built"))
    with pytest.raises(BadMessage, match="more than"):
        layout.read_space(space, "observation")


def test_a_flood_is_bounded_and_ends_the_session(sims):
    url = free_url()
    sims.append(Sim(partial(CountingEnv, 0), url))
    with corral.make_vec(url, 1, supervision=corral.Supervision(start_timeout_s=10)) as vec:
        vec.recv()
        (session,) = vec._fleet.sessions.values()
        frames = [bytes(f) for f in Message(34, 32, session=session.number, layout=session.simulator.layout).frames()]
        flood = session.take
        before = psutil.Process().memory_info().rss
        for _ in range(1000):
            flood(frames)
        with pytest.raises(BadMessage, match="without a request"):
            flood(frames)
        assert psutil.Process().memory_info().rss - before < 20e6
