"""Peers that ask and never read: what waits for them is bounded, and they are lost."""

import contextlib
import time

import pytest

from corral.link import binding
from corral.link.address import parse_url
from corral.link.opening import open_binding


def first_wire(listener):
    """Of a peer that has been heard."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for event in listener.poll(0.1):
            if event.frames is not None:
                return event.wire
    raise AssertionError("nobody came")


@pytest.mark.parametrize("scheme", ["tcp", "zmq", "grpc"])
def test_a_peer_that_does_not_read_what_it_is_sent_is_lost(scheme, monkeypatch):
    monkeypatch.setattr(binding, "MOST_UNSENT_BYTES", 4 << 20)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(
            contextlib.closing(open_binding(scheme, listen=parse_url(f"{scheme}://127.0.0.1:0")))
        )
        dialler = stack.enter_context(contextlib.closing(open_binding(scheme, dial=[parse_url(listener.urls[0])])))
        until = time.monotonic() + 20
        while not (events := dialler.poll(0.1)) and time.monotonic() < until:
            pass
        events[0].wire.send([b"hello"])
        wire = first_wire(listener)
        lost = []
        for _ in range(500):  # half a gigabyte, far more than the system and the libraries hold back
            wire.send([bytes(1 << 20)])
            lost = [event.lost for event in listener.poll(0) if event.lost]
            if lost:
                break
        assert lost == [binding.UNREAD]
