"""Somebody who neither comes nor ends is let go in the end, and that the bound did not hold can be seen."""

import threading

import pytest
import torch
from helpers.learners import Crew, Model

from corral.learn.exchange import server

START = torch.linspace(-1, 1, 40)


@pytest.mark.parametrize(("mode", "lag"), [("ssp", 1), ("sync", 0)])
def test_who_is_let_go_is_counted_and_the_lead_is_what_it_was(mode, lag, monkeypatch):
    monkeypatch.setattr(server, "_PATIENCE_S", 0.3)
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

    with Crew("param_server", 2, START, mode=mode, lag=lag) as crew:
        crew.run(work)
        metrics = crew.servers[0].metrics()
    assert metrics["exchange/let_go"] == 1
    if mode == "ssp":
        assert metrics["exchange/lead_max"] == lag + 1
        assert metrics["exchange/staleness_max"] == 4
    else:
        assert metrics["exchange/dropped"] == 1
