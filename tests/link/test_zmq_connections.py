"""Connections of `zmq://` that are lost and made again while nobody polls, as when a learner is busy learning."""

import contextlib
import time

import pytest
import zmq
from helpers.sims import free_url

from corral.link.address import parse_url
from corral.link.transports.zmq import ZmqBinding


@pytest.fixture
def binding():
    with contextlib.ExitStack() as stack:
        yield lambda **where: stack.enter_context(contextlib.closing(ZmqBinding(**where)))


@contextlib.contextmanager
def peer(kind, url, *, listen=False):
    """A socket of somebody else, who has accepted or made a connection when `wait` returns."""
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.linger = 0
        monitor = sock.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        where = url.replace("zmq://", "tcp://")
        (sock.bind if listen else sock.connect)(where)

        def wait():
            assert monitor.poll(20_000), "no connection was made"

        yield sock, wait
        sock.disable_monitor()
        monitor.close(0)


def poll_until(binding, done):
    events, until = [], time.monotonic() + 20
    while not done(events) and time.monotonic() < until:
        events += binding.poll(0.1)
    return events


def said(events):
    return [e for e in events if e.frames is not None]


def lost(events):
    return [e.wire for e in events if e.lost is not None]


def test_reused_connection_number_is_not_lost(binding):
    router = binding(listen=parse_url("zmq://127.0.0.1:0"))
    with peer(zmq.DEALER, router.urls[0]) as (first, _):
        first.send(b"first")
        (one,) = said(poll_until(router, said))
    with peer(zmq.DEALER, router.urls[0]) as (second, wait):
        wait()
        second.send(b"second")
        time.sleep(0.3)  # so that both are there at the next poll, the message and the word of the loss
        events = poll_until(router, lambda events: said(events) and lost(events))
        (two,) = said(events)
        assert lost(events) == [one.wire]
        two.wire.send([b"welcome"])
        assert second.poll(20_000)
        assert lost(poll_until(router, lambda events: not router.poll(0.1))) == []
    assert lost(poll_until(router, lost)) == [two.wire]


def test_redialled_connection_reports_loss_first(binding):
    url = free_url("zmq")
    with peer(zmq.ROUTER, url, listen=True) as (_, wait):
        dealer = binding(connect=[parse_url(url)])
        wait()
        (one,) = poll_until(dealer, len)
    with peer(zmq.ROUTER, url, listen=True) as (_, wait):
        wait()
        time.sleep(0.3)
        events = poll_until(dealer, lambda events: len(events) > 1)
        assert lost(events) == [one.wire]
        assert [e.wire is one.wire for e in events] == [True, False]
