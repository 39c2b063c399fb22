"""Connections that have proven nothing: little is built for them, and they keep nobody else out."""

import contextlib
import resource
import socket
import threading
import time

import numpy as np
import pytest
from helpers.decoders.wires import Scripted, Strange
from helpers.sims import Sim, free_url, wait_for

import corral
from corral.core.spaces import Layout
from corral.envs.serve import server as serving
from corral.link import protocol as clp
from corral.link.address import parse_url
from corral.link.auth import SIMULATOR, prove
from corral.link.client import fleet as fleets
from corral.link.client.fleet import Fleet
from corral.link.control import OURS, Hello, Ready, from_meta, to_meta
from corral.link.greetings import Greeting, Greetings
from corral.link.message import Message, read_message
from corral.link.transports.base import Event
from corral.testing import CountingEnv
from corral.testing.play import play

TOKEN = b"0123456789abcdef"
LARGE = {"type": "box", "dtype": "float32", "shape": [1 << 24], "low": 0.0, "high": 1.0}
ACTION = {"type": "discrete", "n": 2, "start": 0, "dtype": "int64"}


def hello_of(space, name="peer", instance=bytes(16)):
    return Hello(list(OURS), "test", name, 0, instance, bytes(16), 0, space, ACTION, 1, 4, 1, 0, True, [])


class Peer:
    """A simulator written by hand at a learner's side of the link."""

    def __init__(self, fleet, binding):
        self.fleet, self.binding, self.wire = fleet, binding, Strange()
        self.post(None)

    def post(self, frames):
        self.binding.events = [Event(self.wire, frames)]
        self.fleet.poll(0)

    def answer(self):
        return read_message(self.wire.last)

    def hello(self, hello):
        self.post(Message(clp.Op.HELLO, meta=to_meta(hello)).frames())
        return self.answer()

    def ready(self, proof):
        self.post(Message(clp.Op.READY, meta=to_meta(Ready(proof))).frames())
        return self.answer()


@pytest.fixture
def learner():
    binding = Scripted()
    return Fleet(binding, token=TOKEN), binding


def test_spaces_are_not_built_before_the_proof(learner, monkeypatch):
    monkeypatch.setattr(Layout, "from_json", lambda data: pytest.fail("it was built"))
    peer = Peer(*learner)
    assert peer.hello(hello_of(LARGE)).op == clp.Op.WELCOME
    refusal = peer.ready(bytes(32))
    assert refusal.status == clp.Status.E_AUTH
    assert peer.wire.closed


def test_a_space_is_refused_by_what_it_would_cost(learner):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(4):
        refusal = Peer(*learner).hello(hello_of({**LARGE, "shape": [1 << 26]}))
        assert refusal.status == clp.Status.E_PROTOCOL
        assert "takes more than 256 MiB of memory" in refusal.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes


def test_one_description_is_built_once(learner, monkeypatch):
    fleet, binding = learner
    built, build = [], Layout.from_json
    monkeypatch.setattr(Layout, "from_json", lambda data: built.append(data) or build(data))
    for k in range(3):
        peer = Peer(fleet, binding)
        hello = hello_of({**LARGE, "shape": [4]}, f"peer {k}", bytes([k]) * 16)
        nonce = from_meta(peer.hello(hello).meta, fleets.Welcome).nonce
        peer.ready(prove(TOKEN, SIMULATOR, hello.nonce, nonce))
    assert [session.simulator.spec.name for session in fleet.sessions.values()] == ["peer 0", "peer 1", "peer 2"]
    assert len(built) == 2, "an observation and an action space"
    peer = Peer(fleet, binding)
    hello = hello_of({**LARGE, "shape": [5]}, "other", b"o" * 16)
    nonce = from_meta(peer.hello(hello).meta, fleets.Welcome).nonce
    refusal = peer.ready(prove(TOKEN, SIMULATOR, hello.nonce, nonce))
    assert refusal.status == clp.Status.E_SPACE_MISMATCH


@contextlib.contextmanager
def silent(url, count):
    """Connections that never send anything."""
    address = parse_url(url)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection((address.host, address.port)))
        yield


@pytest.mark.parametrize("learner_first", [True, False])
def test_silent_connections_keep_no_learner_out(learner_first):
    url = free_url("tcp")
    sim = Sim(CountingEnv, url, bind=True)
    try:
        with contextlib.ExitStack() as stack:
            crowd = lambda: stack.enter_context(silent(url, serving._MAX_GREETINGS + 50))  # noqa: E731
            if not learner_first:
                wait_for(url)
                crowd()
            started = time.monotonic()
            vec = stack.enter_context(corral.make_vec(url, 2))
            batch = vec.recv()
            if learner_first:
                crowd()
            for _ in range(30):
                vec.send(batch.env_ids, np.zeros(2, np.int64))
                batch = vec.recv()
                assert not batch.faulty.any()
            assert time.monotonic() - started < 20
    finally:
        sim.end()


def test_silent_connections_keep_no_simulator_out():
    url = free_url("tcp")
    sims = []

    def join():
        with silent(url, fleets._MAX_GREETINGS + 50):
            sims.append(Sim(CountingEnv, url))
            time.sleep(2)

    joining = threading.Timer(0.5, join)
    joining.start()
    try:
        with corral.make_vec(url, 1) as vec:
            assert len(play(vec, 10)) == 1
    finally:
        joining.join()
        for sim in sims:
            sim.end()


class Named(Strange):
    def __init__(self, peer):
        super().__init__()
        self.peer = peer


def test_the_oldest_silent_one_of_the_busiest_host_makes_room():
    greetings = Greetings(4, 60.0)
    crowd = [Named(f"10.0.0.1:{port}") for port in range(3)]
    lone = Named("10.0.0.2:9")
    for wire in (lone, *crowd):
        assert greetings.add(wire, Greeting())
    greetings[crowd[0]].spoke = True
    assert greetings.add(Named("10.0.0.3:1"), Greeting())
    assert [wire.closed for wire in (lone, *crowd)] == [False, False, True, False]


def test_handshakes_under_way_are_not_displaced_at_once():
    greetings = Greetings(2, 60.0)
    busy = [Named(f"10.0.0.1:{port}") for port in range(2)]
    for wire in busy:
        greetings.add(wire, Greeting(spoke=True))
    late = Named("10.0.0.2:1")
    assert not greetings.add(late, Greeting())
    assert late.closed
    greetings[busy[0]].since -= 3
    assert greetings.add(Named("10.0.0.2:2"), Greeting())
    assert [wire.closed for wire in busy] == [True, False]


def test_silent_connections_are_left_sooner():
    greetings = Greetings(4, 60.0)
    quiet, busy = Named("a:1"), Named("a:2")
    greetings.add(quiet, Greeting())
    greetings.add(busy, Greeting(spoke=True))
    for wire in (quiet, busy):
        greetings[wire].since -= 10
    assert greetings.overdue() == [(quiet, 5.0)]
