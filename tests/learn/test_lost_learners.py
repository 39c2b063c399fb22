"""Somebody who neither comes nor ends is let go in the end, and that the bound did not hold can be seen."""

import threading

import pytest
import torch
from helpers.learners import Learners, Model

from corral.learn.exchange import param_server_process

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
