"""Fixtures that tests of the link share."""

import pytest
import zmq
from helpers.json_clients import ANYWHERE, TWO, Client, Hand

from corral.link.client.fleet import Fleet
from corral.link.transports.json_router import JsonBinding


@pytest.fixture
def sims():
    running = []
    yield running
    for sim in running:
        sim.end()


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(0)


@pytest.fixture
def start(context):
    """Starts clients in threads; in the end all have been told that the run is over."""
    clients = []

    def start(url, factory, count):
        clients.extend(Client(url, len(clients) + k, factory, context) for k in range(count))

    yield start
    for client in clients:
        client.join(5)
        assert not client.is_alive()
        assert client.error is None, client.error


@pytest.fixture
def gate():
    """Opens fleets with the gateway, which are closed in the end."""
    fleets = []

    def gate(action=TWO, token=None, **kwargs):
        fleets.append(Fleet(JsonBinding(listen=ANYWHERE, action=action, **kwargs), token))
        return fleets[-1]

    yield gate
    for fleet in fleets:
        fleet.close()


@pytest.fixture
def hand(context, gate):
    fleet = gate()
    hand = Hand(context, fleet)
    hand.reset(0.0, 7)
    return hand
