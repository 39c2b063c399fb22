"""Gossip: graphs, push-sum, and learners that are lost."""

import threading
import time

import numpy as np
import pytest
import torch
from helpers.gradients import START
from helpers.learners import HOST, Learners

from corral.learn.exchange.gossip import receivers, senders


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("graph", ["ring", "exponential", "complete"])
def test_senders_and_receivers_agree(graph, size):
    for number in range(6):
        for rank in range(size):
            for other in receivers(graph, rank, size, number):
                assert other != rank
                assert rank in senders(graph, other, size, number)


def test_an_exponential_graph_mixes_powers_of_two_exactly():
    starts = [torch.full((4,), float(k)) for k in range(4)]

    def work(exchange, rank):
        weights = starts[rank].clone()
        exchange.begin(weights, 0, 4)
        for _ in range(2):
            exchange.params(weights)
        exchange.end()
        return weights.tolist()

    with Learners("gossip", 4, START, graph="exponential") as learners:
        assert learners.run(work) == [[1.5] * 4] * 4


@pytest.mark.parametrize("quantize", [False, True], ids=["whole", "8bit"])
@pytest.mark.parametrize("mode", ["sync", "async", "ssp"])
@pytest.mark.parametrize("graph", ["ring", "exponential", "complete"])
def test_push_sum_goes_to_the_true_mean(graph, mode, quantize):
    starts = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 1000)).astype(np.float32))
    met = threading.Barrier(3)

    def work(exchange, rank):
        weights = starts[rank].clone()
        for turn in range(12):
            exchange.begin(weights, turn, 3)
            met.wait(20)
            for _ in range(5):
                time.sleep(0.001 * rank * (mode != "sync"))
                exchange.params(weights)
            exchange.end()
        return weights

    options = {"graph": graph, "mode": mode, "lag": 2 if mode == "ssp" else 0, "quantize": quantize}
    with Learners("gossip", 3, START, **options) as learners:
        results = learners.run(work)
    spread = float((starts - starts.mean(0)).norm())
    for weights in results:
        apart = float((weights - starts.mean(0)).norm())
        # What is under way when one stops is in nobody's weights; in 8 bits every message rounds anew.
        assert apart < (0.15 if mode != "sync" else 0.01 if quantize else 1e-4) * spread


def test_a_round_of_gossip_is_the_literal_formula():
    """Two learners, a ring: x <- x + dz; half of (x, w) goes, half stays; z = x / w."""
    starts, steps = [torch.tensor([1.0, 2.0]), torch.tensor([5.0, -2.0])], [torch.tensor([0.5, 0.0]), torch.zeros(2)]

    def work(exchange, rank):
        weights = starts[rank].clone()
        exchange.begin(weights, 0, 2)
        weights += steps[rank]  # what an optimizer does
        exchange.params(weights)
        exchange.end()
        return weights.tolist()

    with Learners("gossip", 2, START, graph="ring") as learners:
        assert learners.run(work) == [[3.25, 0.0]] * 2


def test_gossip_drops_lost_learner_and_takes_it_back():
    def work(exchange, rank):
        weights = torch.full((10,), float(rank))
        exchange.begin(weights, 0, 3)
        for k in range(30):
            if rank == 2 and k == 3:
                exchange.close()
                return None
            exchange.params(weights)
        exchange.end()
        return weights

    with Learners("gossip", 3, START, graph="ring") as learners:
        began = time.monotonic()
        one, other, _ = learners.run(work)
        assert torch.isfinite(one).all()
        assert torch.isfinite(other).all()
        assert time.monotonic() - began < 45  # nobody's patience of a minute was used up
        for rank in range(2):
            learners.exchanges[rank].join([(HOST, other.port) for other in learners.exchanges[:2]], rank, 2)

        def again(exchange, rank):
            weights = [one, other][rank].clone()
            exchange.begin(weights, 1, 2)
            for _ in range(20):
                exchange.params(weights)
            exchange.end()
            return weights

        learners.size, learners.join = 2, lambda rank: None
        first, second = learners.run(again)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, (one + other) / 2)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gossip_step_size_without_a_neighbour(mode):
    gone = threading.Event()

    def work(exchange, rank):
        weights = torch.zeros(4)
        exchange.begin(weights, 0, 2)
        for k in range(5):
            weights += 1.0
            exchange.params(weights)
            if rank and k == 1:
                exchange.close()
                gone.set()
                return None
        gone.wait(20)
        steps = []
        for _ in range(40):  # what was under way may still come in, and that it is gone be noticed a little later
            before = weights.clone()
            weights += 1.0
            exchange.params(weights)
            steps.append(float((weights - before).mean()))
            time.sleep(0.02)
        return steps

    with Learners("gossip", 2, START, mode=mode, graph="ring") as learners:
        steps, _ = learners.run(work)
    assert steps[-4:] == pytest.approx([1.0] * 4)


def test_push_sum_weight_stays_positive():
    def work(exchange, rank):
        weights = START.clone()
        exchange.begin(weights, 0, 2)
        for _ in range(50 if rank == 0 else 1):
            if rank == 1:
                time.sleep(0.3)
            exchange.params(weights)
        exchange.end()
        return exchange.metrics()["exchange/push_weight"], weights

    with Learners("gossip", 2, START, mode="async", graph="ring") as learners:
        (kept, weights), _ = learners.run(work)
    assert kept >= 0.25
    torch.testing.assert_close(weights, START, rtol=1e-4, atol=1e-4)
