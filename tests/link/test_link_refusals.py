"""Simulators, strangers and addresses that a learner refuses."""

import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import psutil
import pytest
from helpers.link_steps import lives, steps, steps_on
from helpers.sims import Sim, free_url

import corral
from corral.core.errors import UserError
from corral.link import layout
from corral.link.message import BadMessage, Message
from corral.testing import CountingEnv, OneStateEnv
from corral.testing.play import play


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
        until = time.monotonic() + 20
        while sims[0].alive and time.monotonic() < until:  # it may have started last
            vec.fleet.poll(0.1)
        assert len(vec.fleet.sessions) == 1
    assert sims[0].exitcode == 1
    assert "0123456789abcdef" not in caplog.text


@pytest.mark.parametrize("scheme", ["tcp", "zmq", "grpc"])
def test_second_learner_at_a_url_ends_with_one_sentence(scheme, sims, caplog):
    url = free_url(scheme)
    sims.append(Sim(CountingEnv, url))
    with corral.make_vec(url, 1) as vec, ThreadPoolExecutor() as pool:
        second = pool.submit(corral.make_vec, url, 1, env_kwargs={"reconnect_s": 4.0})  # other options: another fleet
        batch = vec.recv()
        while not second.done():  # the first one goes on
            vec.send(batch.env_ids, np.zeros(1, np.int64))
            batch = vec.recv()
        with pytest.raises(UserError, match=f"^Another learner listens at {url}"):
            second.result()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "is another learner" in warnings[0]


def test_listening_for_other_machines_needs_a_token_or_insecure():
    with pytest.raises(UserError, match="token"):
        corral.make_vec("tcp://0.0.0.0:0", 1)


@pytest.mark.parametrize("bad", ["tcp://host", "tcp://host:99999", "http://127.0.0.1:80", "tcp://a b:1"])
def test_invalid_address_is_refused(bad):
    with pytest.raises(UserError, match=r"HOST:PORT|not one of"):
        corral.make_vec(bad, 1)


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
        (session,) = vec.fleet.sessions.values()
        frames = [bytes(f) for f in Message(34, 32, session=session.number, layout=session.simulator.layout).frames()]
        flood = session.take
        before = psutil.Process().memory_info().rss
        for _ in range(1000):
            flood(frames)
        with pytest.raises(BadMessage, match="without a request"):
            flood(frames)
        assert psutil.Process().memory_info().rss - before < 20e6


def test_unknown_host_is_named_when_no_simulator_answers():
    with pytest.raises(corral.EnvFailed, match=r"\(there is no host named nohost\.invalid\) after"):
        corral.make_vec("tcp://nohost.invalid:3", 1, supervision=corral.Supervision(start_timeout_s=0.1))
