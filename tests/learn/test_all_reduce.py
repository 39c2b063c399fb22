"""What every exchange does with gradients, and what only several learners can."""

import threading

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.core.types import EnvSpec, LossOutput, Sample, Transitions
from corral.learn.device import Precision
from corral.learn.exchange.all_reduce import AllReduce, open_store
from corral.learn.exchange.base import Exchange, PeerLost
from corral.learn.learner import Learner
from corral.testing.counting_agent import Config, Counting


@pytest.mark.parametrize("make", [Exchange, AllReduce])
def test_one_learner_alone_keeps_its_gradient(make):
    exchange, grad = make(), torch.randn(7)
    before = grad.clone()
    assert exchange.grads(grad, 3, 0.1) == "apply"
    assert torch.equal(grad, before)
    assert exchange.grads(grad, 3, 0.1, stop=True) == "stop"
    (values,) = exchange.share(grad)
    assert torch.equal(values, before)


def together(work, size=3, timeout_s=20.0):
    """What `work(exchange, rank)` returns, for each of several threads that have met."""
    store, results = open_store("127.0.0.1"), {}

    def member(rank):
        exchange = AllReduce()
        exchange.join("127.0.0.1", store.port, 1, rank, size, timeout_s)
        try:
            results[rank] = work(exchange, rank)
        except Exception as error:
            results[rank] = error
        finally:
            exchange.leave()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[rank] for rank in range(size)]


def test_gradients_are_averaged_by_rows():
    own, rows = np.random.default_rng(0).normal(size=(3, 101)).astype(np.float32), [5, 1, 10]

    def work(exchange, rank):
        grad = torch.from_numpy(own[rank].copy())
        assert exchange.grads(grad, rows[rank], 0.1) == "apply"
        return grad.numpy()

    results = together(work)
    expected = sum(n * g for n, g in zip(rows, own.astype(np.float64), strict=True)) / sum(rows)
    np.testing.assert_allclose(results[0], expected, rtol=1e-5, atol=1e-6)
    assert all(np.array_equal(results[0], other) for other in results)


def test_gradients_of_losses_that_are_sums_add_up():
    def work(exchange, rank):
        grad = torch.full((4,), float(rank + 1))
        exchange.grads(grad, 0, 0.1)
        return grad.tolist()

    assert together(work) == [[6.0] * 4] * 3


def test_when_one_stops_all_do():
    assert together(lambda exchange, rank: exchange.grads(torch.ones(4), 2, 0.1, stop=rank == 1)) == ["stop"] * 3


def test_shared_values_have_one_order():
    def work(exchange, rank):
        return [values.tolist() for values in exchange.share(torch.tensor([rank, 10.0 * rank], dtype=torch.float64))]

    assert together(work) == [[[0.0, 0.0], [1.0, 10.0], [2.0, 20.0]]] * 3


def test_leaving_learner_is_noticed_at_once():
    def work(exchange, rank):
        exchange.grads(torch.ones(1000), 1, 0.1)
        if rank < 2:
            with pytest.raises(PeerLost):
                exchange.grads(torch.ones(1000), 1, 0.1)
        return "went on"

    assert together(work, timeout_s=600) == ["went on"] * 3  # the threads have a minute


def test_missing_learner_times_out():
    store = open_store("127.0.0.1")
    with pytest.raises(PeerLost):
        AllReduce().join("127.0.0.1", store.port, 1, 0, 2, 0.5)
    with pytest.raises(PeerLost):
        AllReduce().join("127.0.0.1", 9, 1, 0, 2, 0.5)


class Uneven(Counting):
    """As many minibatches as its batch has rows."""

    def minibatches(self, batch, rng):
        yield from range(len(batch.reward))

    def losses(self, model, target, batch, ctx):
        weights = next(model.parameters())
        yield LossOutput(0.0, {}, backward=lambda: weights.grad.add_(1.0))


@pytest.mark.parametrize(("counts", "updates"), [([2, 2, 2], 2), ([3, 1, 2], 1), ([0, 4, 4], 0), ([0, 0, 0], 0)])
def test_uneven_shares_make_the_same_number_of_updates(counts, updates):
    def work(exchange, rank):
        algo = Uneven(Config(), EnvSpec(spaces.Box(-1, 1, (1,)), spaces.Discrete(2)), 1)
        learner = Learner(algo, algo.build_model(), torch.Generator(), Precision("fp32", ""), exchange)
        for _ in range(2):
            rows = np.ones(counts[rank], np.float32)
            learner.step(Sample(Transitions(rows, rows, rows, rows, rows, rows)), 0.0)
        return learner.version

    assert together(work) == [2 * updates] * 3


class Odd(Counting):
    """Its loss is the batch's reward, and its gradient is 1 whatever that is."""

    def losses(self, model, target, batch, ctx):
        weights = next(model.parameters())
        yield LossOutput(float(batch.reward[0]) * 1e300 * 1e300, {}, backward=lambda: weights.grad.add_(1.0))


def test_not_finite_loss_of_one_is_skipped_by_all():
    def batch(reward):
        ones = np.ones(1, np.float32)
        return Sample(Transitions(ones, ones, np.full(1, reward, np.float32), ones, ones, ones))

    def work(exchange, rank):
        algo = Odd(Config(), EnvSpec(spaces.Box(-1, 1, (1,)), spaces.Discrete(2)), 1)
        learner = Learner(algo, algo.build_model(), torch.Generator(), Precision("fp32", ""), exchange)
        learner.step(batch(1.0 if rank == 1 else 0.0), 0.0)  # of one, infinity times a finite gradient
        assert (learner.version, learner.skipped) == (0, 1)
        learner.step(batch(0.0), 0.0)
        assert (learner.version, learner.skipped) == (1, 1)
        return learner.flat.weights.tolist()

    results = together(work)
    assert results[0] == results[1] == results[2] != [1.0]
