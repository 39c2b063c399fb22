"""Random and mutated messages into every decoder: nothing but the errors that are meant, no growth.

A few thousand with the other tests; `make fuzz` sets CORRAL_FUZZ to a million.
"""

import contextlib
import logging
import os
import random
import time
from functools import partial

import gymnasium
import numpy as np
import psutil
import pytest
from helpers.decoders import DECODERS, VECTORS, Scripted, Strange, frames_in

from corral.envs.serve.server import SimulatorServer
from corral.link import protocol as clp
from corral.link.client.fleet import Fleet
from corral.link.control import Budget, Welcome, to_meta
from corral.link.layout import read_space
from corral.link.message import BadMessage, Message, read_message
from corral.link.protocol import Limits
from corral.link.transports.base import Event
from corral.link.transports.tcp import pack

COUNT = int(os.environ.get("CORRAL_FUZZ", "5000"))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """What is logged would be kept by pytest, and grow."""
    monkeypatch.setattr(logging.getLogger("corral"), "disabled", True)
    for name in ("link", "envs", "simulators", "states"):
        monkeypatch.setattr(logging.getLogger(f"corral.{name}"), "disabled", True)


def mutated(rng, data):
    """Some bytes changed, cut, doubled, or put in."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = rng.choice((0, 1, 127, 128, 255))
        elif kind == 2:
            del data[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
    return bytes(data)


def in_time(count, each):
    """Call it `count` times with a generator of its own; no call may take long, and memory must not grow."""
    rng, process = random.Random(count), psutil.Process()
    began, before = time.perf_counter(), None
    for k in range(count):
        started = time.perf_counter()
        each(rng)
        assert time.perf_counter() - started < 5.0
        if k == count // 4:
            before = process.memory_info().rss
    grown, took = process.memory_info().rss - before, time.perf_counter() - began
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2]
    print(f" {test}: {count} in {took:.0f} s, memory from {before / 1e6:.0f} MB by {grown / 1e6:+.1f} MB")
    assert grown < 30e6


@pytest.mark.parametrize("name", DECODERS)
def test_random_and_mutated_bytes(name):
    make, good = DECODERS[name]
    decode, inputs = make(), good()
    for data in inputs:
        decode(data)

    def each(rng):
        decode(mutated(rng, rng.choice(inputs)) if rng.random() < 0.9 else rng.randbytes(rng.randrange(200)))

    in_time(COUNT, each)


FRAMES = [frames for data in VECTORS for frames in frames_in(data)]


def mutated_frames(rng):
    """A message whose header, meta, payload or number of frames is not what it was."""
    frames = list(rng.choice(FRAMES))
    at = rng.randrange(len(frames))
    kind = rng.randrange(4)
    if kind == 0:
        frames[0] = mutated(rng, frames[0])[:32].ljust(32, b"\0")
    elif kind == 1:
        frames[at] = mutated(rng, frames[at])
    elif kind == 2:
        del frames[at]
    else:
        frames.insert(at, rng.randbytes(rng.randrange(40)))
    return frames


def test_spaces_that_cannot_be():
    kinds = ("box", "discrete", "multi_discrete", "multi_binary", "dict", "tuple", "graph", None, 3)
    odd = (
        -1,
        0,
        1,
        3,
        2**31,
        2**63,
        1e300,
        "inf",
        "x",
        None,
        [],
        [1],
        [2, 3],
        [-1],
        [2**40, 2**40],
        {},
        "float32",
        "object",
    )

    def space(rng, depth=0):
        made = {"type": rng.choice(kinds)}
        for key in ("dtype", "shape", "low", "high", "n", "start", "nvec", "spaces"):
            if rng.random() < 0.7:
                made[key] = rng.choice(odd)
        if rng.random() < 0.4 and depth < 12:
            made["spaces"] = [space(rng, depth + 1) if rng.random() < 0.5 else ["k", space(rng, depth + 1)]]
        if rng.random() < 0.5:
            made["dtype"] = rng.choice(("float32", "int64", "uint8", "bool"))
        return made

    def each(rng):
        with contextlib.suppress(BadMessage):
            read_space(space(rng), "observation")

    in_time(COUNT, each)


def test_anything_into_a_learner_that_greets():
    binding = Scripted()
    fleet = Fleet(binding)

    def each(rng):
        wire = Strange()
        binding.events = [Event(wire), Event(wire, rng.choice(FRAMES) if rng.random() < 0.3 else mutated_frames(rng))]
        binding.events.append(Event(wire, mutated_frames(rng)))
        fleet.poll(0)
        binding.events = [Event(wire, lost="gone")]
        fleet.poll(0)
        for session in list(fleet.sessions.values()):
            fleet.dismiss(session)
        fleet.spec = None
        assert wire.sent <= 3

    in_time(COUNT, each)
    assert not fleet._greetings
    assert not fleet._by_wire


@pytest.fixture
def served():
    binding = Scripted()
    server = SimulatorServer(partial(gymnasium.make, "CartPole-v1"), "CartPole-v1", binding, 8)
    yield binding, server
    server.close()


def test_anything_into_a_simulator(served):
    binding, server = served
    layout = server._layout

    def greet(wire):
        welcome = Welcome((1, 0), 5, False, bytes(16), b"", 4, Limits(message=1 << 20, batch=8), Budget(1 << 20, 10))
        binding.events = [Event(wire), Event(wire, Message(clp.Op.WELCOME, meta=to_meta(welcome)).frames())]
        server.poll(0)

    wire = Strange()
    greet(wire)
    good = [read_message(frames) for frames in FRAMES]
    state = {"wire": wire, "seq": 0}

    def each(rng):
        wire = state["wire"]
        if wire.closed:  # what was none of the protocol ended the session; here is another
            server._sessions.clear()
            server._by_wire.clear()
            wire = state["wire"] = Strange()
            greet(wire)
            state["seq"] = 0
        message = rng.choice(good)
        state["seq"] += 1
        sent = Message(
            message.op, message.flags, 0, state["seq"], 5, layout, rng.choice((message.batch, 1, 2, 3, 2**32 - 1)), 0,
            message.meta, [mutated(rng, frame) if rng.random() < 0.3 else frame for frame in message.payload],
        )  # fmt: skip
        frames = [bytes(frame) for frame in sent.frames()]
        if rng.random() < 0.2:
            frames = mutated_frames(rng)
        binding.events = [Event(wire, frames)]
        server.poll(0)
        assert len(server._sessions) <= 1

    in_time(COUNT, each)


def test_anything_from_a_simulator_that_was_taken_on():
    from corral.core.spaces import Layout
    from corral.link.layout import RowsLayout, space_group

    binding = Scripted()
    fleet = Fleet(binding)
    hello = next(read_message(frames) for frames in FRAMES if frames[0][3] == clp.Op.HELLO)
    from corral.envs.backends.simulators.vec_env import LinkVecEnv
    from corral.envs.supervision import Supervision

    supervision = Supervision(restarts_in_a_row=10**9, restarts_total=10**9)

    def join():
        wire = Strange()
        binding.events = [Event(wire), Event(wire, hello.frames())]
        fleet.poll(0)
        binding.events = [Event(wire, Message(clp.Op.READY, meta={"proof": b""}).frames())]
        fleet.poll(0)
        return wire

    join()
    spec = fleet.spec
    vec = LinkVecEnv(fleet, 2, supervision, "train", simulators=1, elastic=True, release=lambda: None)
    obs, rows = space_group(Layout(spec.observation_space)), RowsLayout().group()
    vec.reset(0)

    def each(rng):
        for session in list(fleet.sessions.values()):
            wire = session.wire
            for request in list(session.waiting.values()):
                batch = request.batch
                frame, leaves = rows.make(batch)
                if rng.random() < 0.5:
                    leaves[1][:] = [rng.choice((0, 1, 2, 4, 6, 9, 10, 14, 255)) for _ in range(batch)]
                ended = int(np.count_nonzero((leaves[1] & 12) == 8))
                payload = [bytes(frame), bytes(obs.size(batch))] + ([bytes(obs.size(ended))] if ended else [])
                if rng.random() < 0.3:
                    payload = [mutated(rng, part) for part in payload]
                reply = Message(
                    request.op, clp.REPLY, 0, request.seq, session.number, session.simulator.layout, batch, 1,
                    payload=payload,
                )  # fmt: skip
                binding.events.append(Event(wire, reply.frames() if rng.random() < 0.8 else mutated_frames(rng)))
        fleet.poll(0)
        if not fleet.sessions:
            join()
        ready = vec._in_flight.ready
        if ready:
            batch = vec.recv(min_ready=1)
            vec.send(batch.env_ids, np.zeros(len(batch), np.int64))

    try:
        in_time(COUNT, each)
    finally:
        vec.close()


def test_a_message_of_the_vectors_is_left_alone_by_packing():
    assert [b"".join(pack(frames)) for frames in FRAMES] == VECTORS
