"""Somebody who neither comes nor ends is let go in the end, and that the bound did not hold can be seen."""

import threading
import time

import pytest
import torch
from helpers.learners import Learners, Model

from corral.learn.exchange import param_server_process
from corral.learn.exchange.base import PeerLost

START = torch.linspace(-1, 1, 40)


@pytest.mark.parametrize(("mode", "lag"), [("ssp", 1), ("sync", 0)])
def test_learner_past_timeout_is_dropped_and_counted(mode, lag, monkeypatch):
    monkeypatch.setattr(param_server_process, "_TIMEOUT_S", 0.3)
    done, begun = threading.Event(), threading.Barrier(2)

    def work(exchange, rank):
        model = Model(START)
        exchange.begin(model.weights.data, 0, 2)
        begun.wait(20)
        if rank:
            done.wait(30)  # it acts, for longer than anybody's patience
        for _ in range(4 if not rank else 1):
            model.update(exchange, 0.1 * torch.ones(40))
        done.set()
        exchange.end()

    with Learners("param_server", 2, START, mode=mode, lag=lag) as learners:
        learners.run(work)
        metrics = learners.servers[0].metrics()
    assert metrics["exchange/timeouts"] == 1
    if mode == "ssp":
        assert metrics["exchange/lead_max"] == lag + 1
        assert metrics["exchange/staleness_max"] == 4
    else:
        assert metrics["exchange/dropped"] == 1


def test_servers_never_begin_a_turn_with_different_workers(monkeypatch):
    """Otherwise their rounds of several groups would wait for each other until the timeout, again and again."""
    monkeypatch.setattr(param_server_process, "_WORKERS_S", 0.5)
    monkeypatch.setattr(param_server_process, "_TIMEOUT_S", 3.0)
    left = []

    def work(exchange, rank):
        send = exchange._send

        def late(server, kind, message):  # the first server still waits for it, the second does not
            time.sleep(0.3)
            send(server, kind, message)

        if rank:
            exchange._send = late
        try:
            exchange.begin(START.clone(), 0, 2)
        except PeerLost:
            left.append(rank)
            return
        exchange._send = send
        for _ in range(2):
            for group in range(2):
                exchange.grads(torch.ones(20), 1, 0.1, group=group)

    groups = [slice(0, 20), slice(20, 40)]
    with Learners("param_server", 2, START, servers=2, groups=groups) as learners:
        learners.run(work)
        assert [server.metrics()["exchange/timeouts"] for server in learners.servers] == [0, 0]
    assert sorted(left) == [0, 1]
