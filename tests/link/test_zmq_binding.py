"""What libzmq tells about connections, and when: who is lost, and what was said before."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest
import zmq

from corral.link.address import parse_url
from corral.link.transports.zmq import ZmqBinding

DEALER = """
import sys, zmq
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
    dealer.connect(sys.argv[1])
    dealer.send(b"hello")
    sys.stdin.read()
"""


@pytest.fixture
def binding():
    with contextlib.closing(ZmqBinding(listen=parse_url("zmq://127.0.0.1:0"))) as made:
        yield made


def events_until(binding, enough):
    """What happens until it is enough, for ten seconds at most."""
    events, until = [], time.monotonic() + 10
    while time.monotonic() < until and not enough(events):
        events += [(e.wire, e.lost, e.frames and bytes(e.frames[0])) for e in binding.poll(0.1)]
    return events


def test_reused_descriptor_is_not_reported_lost(binding):
    endpoint = binding.urls[0].replace("zmq", "tcp")
    with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))):
        time.sleep(0.2)  # until it is accepted
    placeholder = os.open(os.devnull, os.O_RDONLY)  # in the place of this side's descriptor
    assert binding._router.monitor.poll(10_000)
    dealer = subprocess.Popen([sys.executable, "-c", DEALER, endpoint], stdin=subprocess.PIPE)
    try:
        until = time.monotonic() + 10
        while not binding._router.socket.poll(50) and time.monotonic() < until:
            pass
        events = events_until(binding, lambda seen: any(said for _, _, said in seen))
        events += [(e.wire, e.lost, None) for e in binding.poll(0.2)]
        assert [(lost, said) for _, lost, said in events] == [(None, None), (None, b"hello")]
    finally:
        dealer.communicate()
        os.close(placeholder)


def test_last_message_precedes_lost_event(binding, monkeypatch):
    with zmq.Context() as context:
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(binding.urls[0].replace("zmq", "tcp"))
            dealer.send(b"hello")
            (wire, _, _), _ = events_until(binding, lambda seen: len(seen) >= 2)
            dealer.send(b"goodbye")
        context.term()
    assert binding._router.monitor.poll(10_000)
    look, looks = binding._read, []
    monkeypatch.setattr(binding, "_read", lambda *args: looks.append(args) or (len(looks) > 1 and look(*args)))
    events = events_until(binding, lambda seen: any(lost for _, lost, _ in seen))
    assert events == [(wire, None, b"goodbye"), (wire, "the connection is lost", None)]
