"""What the exchanges of several learners promise, whichever it is."""

import pytest
import torch
from helpers.gradients import START, grads, sgd
from helpers.learners import Learners, Model

from corral.learn.exchange.base import Exchange

KINDS = [
    ("all_reduce", {}),
    ("param_server", {"mode": "sync"}),
    ("param_server", {"mode": "async"}),
    ("param_server", {"mode": "ssp", "lag": 2}),
    ("gossip", {"mode": "sync"}),
    ("gossip", {"mode": "async", "graph": "ring"}),
    ("gossip", {"mode": "ssp", "lag": 2, "graph": "complete"}),
]


IDS = ["-".join([kind, *map(str, options.values())]) for kind, options in KINDS]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_single_learner_equals_no_exchange(kind, options):
    alone = Model(START)
    for grad in grads(0):
        alone.update(Exchange(), grad)

    def work(exchange, rank):
        model = Model(START)
        for turn in range(2):
            exchange.begin(model.weights.data, turn, 1)
            for grad in grads(0)[turn * 10 : turn * 10 + 10]:
                model.update(exchange, grad)
            exchange.end()
        return model.weights.detach()

    with Learners(kind, 1, START, **options) as learners:
        (weights,) = learners.run(work)
    assert torch.equal(weights, alone.weights.detach())


@pytest.mark.parametrize(("kind", "options"), KINDS[1:], ids=IDS[1:])  # a reduction's make the same: test_exchanges.py
def test_several_learners_get_through_turns_of_different_lengths(kind, options):
    def work(exchange, rank):
        model = Model(START)
        for turn in range(3):
            exchange.begin(model.weights.data, turn, 3)
            for grad in grads(rank)[: 3 + 2 * rank]:
                model.update(exchange, 0.1 * grad)
            exchange.end()
        return model.weights.detach()

    with Learners(kind, 3, START, **options) as learners:
        results = learners.run(work)
    assert all(torch.isfinite(weights).all() for weights in results)
    # Learners that need not wait for each other may end a turn before others begin it, and then mix with none.
    near = 0.2 if options.get("mode", "sync") == "sync" else 1.0
    assert all(float((weights - results[0]).norm() / START.norm()) < near for weights in results)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("all_reduce", {}),
        ("all_reduce", {"compress": "topk:0.05"}),
        ("all_reduce", {"compress": "qsgd:8"}),
        ("all_reduce", {"compress": "sign"}),
        ("param_server", {"mode": "sync"}),
        ("param_server", {"mode": "sync", "servers": 3}),
        ("param_server", {"mode": "sync", "compress": "topk:0.05+qsgd:8", "quantize": True}),
    ],
    ids=str,
)
def test_synchronous_learners_have_the_same_weights_bit_by_bit(kind, options):
    def work(exchange, rank):
        model = Model(START)
        exchange.begin(model.weights.data, 0, 3)
        for grad in grads(rank):
            model.update(exchange, grad, rows=1 + rank)
        exchange.end()
        return model.weights.detach().clone()

    with Learners(kind, 3, START, **options) as learners:
        results = learners.run(work)
    assert all(torch.equal(results[0], other) for other in results)
    assert not torch.equal(results[0], START)


@pytest.mark.parametrize(("kind", "servers"), [("all_reduce", 1), ("param_server", 1), ("param_server", 2)])
def test_several_synchronous_learners_equal_one_with_all_rows(kind, servers):
    rows = [5, 1, 10]
    whole = Model(START, sgd)
    for parts in zip(*(grads(rank) for rank in range(3)), strict=True):
        mean = sum(n * grad.double() for n, grad in zip(rows, parts, strict=True)) / sum(rows)
        whole.update(Exchange(), mean.float())

    def work(exchange, rank):
        model = Model(START, sgd)
        exchange.begin(model.weights.data, 0, 3)
        for grad in grads(rank):
            model.update(exchange, grad, rows=rows[rank])
        exchange.end()
        return model.weights.detach()

    with Learners(kind, 3, START, servers=servers, optimizer=sgd) as learners:
        for weights in learners.run(work):
            torch.testing.assert_close(weights, whole.weights.detach(), rtol=0, atol=1e-6)


def test_gradients_of_a_stopped_update_are_not_applied_later():
    def work(exchange, rank):
        model = Model(START, sgd)
        exchange.begin(model.weights.data, 0, 2)
        for k, grad in enumerate(grads(rank)):
            if k % 3 == 1:  # one learner stops, or its gradient is not finite
                exchange.grads(grad.clone() if rank else grad * float("nan"), 1, 0.1, stop=rank == 0 and k % 2 == 0)
            else:
                model.update(exchange, grad)
        return model.weights.detach()

    whole, lossless = (
        Learners("all_reduce", 2, START, compress=compress, optimizer=sgd) for compress in ("none", "topk:1.0")
    )
    with whole, lossless:
        torch.testing.assert_close(lossless.run(work)[0], whole.run(work)[0], rtol=0, atol=1e-6)
