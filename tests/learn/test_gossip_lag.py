"""Gossip between learners: rounded weights, and how far ahead one may be."""

import threading
import time

import numpy as np
import pytest
import torch
from helpers.exchange_nets import GROUPS, START
from helpers.learners import HOST, Learners
from torch import nn

from corral.learn.exchange.base import ExchangeSetup, make_exchange
from corral.learn.exchange.config import DataParallelConfig


@pytest.mark.parametrize("mode", ["sync", "async", "ssp"])
@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_nothing_is_lost_by_rounding_weights_to_8_bits(graph, mode):
    """What one sends and the others get is the same, so sums stay what they are whatever the codes leave out."""
    starts = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 1000)).astype(np.float32))
    options = {"graph": graph, "mode": mode, "lag": 2 if mode == "ssp" else 0, "quantize": True}
    met = threading.Barrier(3)

    def work(exchange, rank):
        weights = starts[rank].clone()
        exchange.begin(weights, 0, 3)
        met.wait(20)
        for _ in range(30):
            exchange.params(weights)
        met.wait(20)  # who ends is not waited for, and what comes then is late

    with Learners("gossip", 3, START, **options) as learners:
        learners.run(work)
        until = time.monotonic() + 10
        while time.monotonic() < until:  # some is on its way
            shares = [share for exchange in learners.exchanges for share in list(exchange._inbox.values())]
            weight = sum(exchange._weight for exchange in learners.exchanges) + sum(w for _, w in shares)
            if abs(weight - 3) < 1e-9:
                break
        x = sum(exchange._x.double() for exchange in learners.exchanges) + sum(
            torch.from_numpy(x).double() for x, _ in shares
        )
        assert all(exchange._error > 1e-3 for exchange in learners.exchanges)  # there was something to lose
    assert weight == pytest.approx(3.0, abs=1e-9)
    assert float((x - starts.double().sum(0)).abs().max()) < 1e-5


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_gossip_waits_at_lag_bound(lag):
    done, go, begun = [0], threading.Semaphore(0), threading.Barrier(2)

    def work(exchange, rank):
        weights = START.clone()
        exchange.begin(weights, 0, 2)
        begun.wait(20)
        for _ in range(lag + 3):
            if rank:
                assert go.acquire(timeout=20)
            exchange.params(weights)
            if rank == 0:
                done[0] += 1
        exchange.end()

    def look():
        counts = []
        for _ in range(4):
            until = time.monotonic() + 10
            while done[0] < lag + len(counts) and time.monotonic() < until:
                time.sleep(0.005)
            time.sleep(0.1)  # for one more, if it did not wait
            counts.append(done[0])
            go.release()
        for _ in range(lag):
            go.release()
        return counts

    with Learners("gossip", 2, START, graph="ring", mode="ssp", lag=lag) as learners:
        counts: list[int] = []
        watcher = threading.Thread(target=lambda: counts.extend(look()), daemon=True)
        watcher.start()
        learners.run(work)
        watcher.join(20)
    assert counts == [lag, lag + 1, lag + 2, lag + 3]


def test_learners_round_weights_with_own_generators():
    config = DataParallelConfig(exchange="gossip", quantize_weights=True)
    exchanges = [make_exchange(ExchangeSetup(config, nn.Linear(2, 2), GROUPS, HOST, bytes(32), k)) for k in range(3)]
    codes = [exchange._codec.encode(START.numpy(), exchange._rng).tobytes() for exchange in exchanges]
    for exchange in exchanges:
        exchange.close()
    assert len(set(codes)) == 3
