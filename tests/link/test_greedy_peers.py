"""Peers that take too much: they ask and never read, or are more than there are descriptors for."""

import contextlib
import errno
import socket
import time

import pytest

from corral.link.address import parse_url
from corral.link.transports import base as binding
from corral.link.transports.open import open_binding


def first_wire(listener):
    """Of a peer that has been heard."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for event in listener.poll(0.1):
            if event.frames is not None:
                return event.wire
    raise AssertionError("nobody came")


@pytest.mark.parametrize("scheme", ["tcp", "zmq", "grpc"])
def test_peer_that_does_not_read_is_lost(scheme, monkeypatch):
    monkeypatch.setattr(binding, "MAX_UNSENT_BYTES", 4 << 20)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(
            contextlib.closing(open_binding(scheme, listen=parse_url(f"{scheme}://127.0.0.1:0")))
        )
        dialler = stack.enter_context(contextlib.closing(open_binding(scheme, connect=[parse_url(listener.urls[0])])))
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


class _NoMore:
    """A door where somebody waits, for whom there is no descriptor until `there_are`."""

    def __init__(self, door):
        self._door, self.there_are, self.tries = door, False, 0

    def __getattr__(self, name):
        return getattr(self._door, name)

    def accept(self):
        self.tries += 1
        if not self.there_are:
            raise OSError(errno.EMFILE, "too many open files")
        return self._door.accept()


def test_listener_rests_when_out_of_descriptors():
    with contextlib.closing(open_binding("tcp", listen=parse_url("tcp://127.0.0.1:0"))) as listener:
        listener._listener = door = _NoMore(listener._listener)
        host, port = listener.urls[0].partition("://")[2].split(":")
        with socket.create_connection((host, int(port)), 20):
            until = time.monotonic() + 1
            while time.monotonic() < until:
                listener.poll(1.0)
            assert 1 <= door.tries < 20
            door.there_are = True
            until = time.monotonic() + 20
            while not (events := listener.poll(0.1)) and time.monotonic() < until:
                pass
            assert events[0].frames is None  # it is there
