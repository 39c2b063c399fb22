"""What the exchanges of several learners promise, whichever it is, and what each promises besides."""

import threading
import time

import numpy as np
import pytest
import torch
from helpers.learners import HOST, Crew, Model

from corral.learn.exchange.base import Local, PeerLost
from corral.learn.exchange.gossip import receivers, senders
from corral.nets.obs_norm import ObsNorm

START = torch.from_numpy(np.random.default_rng(0).normal(size=1000).astype(np.float32))
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


def grads(rank, count=20, size=1000):
    return torch.from_numpy(np.random.default_rng(100 + rank).normal(size=(count, size)).astype(np.float32))


def sgd(params):
    return torch.optim.SGD(params, 1e-2)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_one_learner_alone_is_the_same_as_with_no_exchange_bit_by_bit(kind, options):
    alone = Model(START)
    for grad in grads(0):
        alone.update(Local(), grad)

    def work(exchange, rank):
        model = Model(START)
        for turn in range(2):
            exchange.begin(model.weights.data, turn, 1)
            for grad in grads(0)[turn * 10 : turn * 10 + 10]:
                model.update(exchange, grad)
            exchange.end()
        return model.weights.detach()

    with Crew(kind, 1, START, **options) as crew:
        (weights,) = crew.run(work)
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

    with Crew(kind, 3, START, **options) as crew:
        results = crew.run(work)
    assert all(torch.isfinite(weights).all() for weights in results)
    near = 0.2 if options.get("mode") != "async" else 1.0  # who is done before others begin has had nobody to mix with
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

    with Crew(kind, 3, START, **options) as crew:
        results = crew.run(work)
    assert all(torch.equal(results[0], other) for other in results)
    assert not torch.equal(results[0], START)


@pytest.mark.parametrize(("kind", "servers"), [("all_reduce", 1), ("param_server", 1), ("param_server", 2)])
def test_several_synchronous_learners_equal_one_with_all_rows(kind, servers):
    rows = [5, 1, 10]
    whole = Model(START, sgd)
    for parts in zip(*(grads(rank) for rank in range(3)), strict=True):
        mean = sum(n * grad.double() for n, grad in zip(rows, parts, strict=True)) / sum(rows)
        whole.update(Local(), mean.float())

    def work(exchange, rank):
        model = Model(START, sgd)
        exchange.begin(model.weights.data, 0, 3)
        for grad in grads(rank):
            model.update(exchange, grad, rows=rows[rank])
        exchange.end()
        return model.weights.detach()

    with Crew(kind, 3, START, servers=servers, optimizer=sgd) as crew:
        for weights in crew.run(work):
            torch.testing.assert_close(weights, whole.weights.detach(), rtol=0, atol=1e-6)


# -- parameter server ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_nobody_is_more_than_the_lag_ahead_of_the_slowest(lag):
    lead, clocks, lock, begun = [], [0, 0, 0], threading.Lock(), threading.Barrier(3)

    def work(exchange, rank):
        model = Model(START)
        exchange.begin(model.weights.data, 0, 3)
        begun.wait(20)  # who begins later begins with the newest weights, and as far ahead as anybody
        for grad in grads(rank, 15):
            time.sleep(0.004 * rank)  # the first is as fast as it can be
            model.update(exchange, 0.1 * grad)
            with lock:
                clocks[rank] += 1
                lead.append(max(clocks) - min(clocks))
        begun.wait(20)  # nor does one that has ended count
        exchange.end()

    with Crew("param_server", 3, START, mode="ssp", lag=lag) as crew:
        crew.run(work)
        assert crew.servers[0].metrics()["exchange/lead_max"] <= lag
        if lag:  # it was made use of
            assert crew.servers[0].metrics()["exchange/lead_max"] == lag
    # What a learner counts comes after the server's word: it may be one behind, and one is under way.
    assert max(lead) <= lag + 2


def test_nor_by_resting_in_between():
    """Turns of fewer updates than the lag: who rests and comes back is as far ahead as before."""
    slow_done = threading.Event()

    def work(exchange, rank):
        model = Model(START)
        if rank:
            exchange.begin(model.weights.data, 0, 2)
            time.sleep(0.5)  # a gradient takes its time, by weights of the beginning
            model.update(exchange, 0.1 * grads(rank)[0])
            slow_done.set()
            exchange.end()
            return 0
        time.sleep(0.1)
        made = 0
        for turn in range(20):
            exchange.begin(model.weights.data, turn, 2)
            for grad in grads(rank)[:2]:
                model.update(exchange, 0.1 * grad)
                made += not slow_done.is_set()
            exchange.end()
        return made

    with Crew("param_server", 2, START, mode="ssp", lag=2) as crew:
        made, _ = crew.run(work)
        assert crew.servers[0].metrics()["exchange/staleness_max"] <= 4  # the bound, and one under way on either side
    assert made <= 4


def test_without_a_bound_the_fast_one_runs_ahead_and_stale_gradients_are_counted():
    def work(exchange, rank):
        model = Model(START)
        exchange.begin(model.weights.data, 0, 2)
        for grad in grads(rank, 40 if rank == 0 else 4):
            if rank:
                time.sleep(0.05)
            model.update(exchange, 0.1 * grad)
        exchange.end()

    with Crew("param_server", 2, START, mode="async") as crew:
        crew.run(work)
        told = crew.servers[0].metrics()
        assert told["exchange/staleness_max"] > 4
        assert crew.servers[0].version == 44


def test_an_update_does_not_wait_for_who_may_be_dropped():
    """Of 3 workers 1 may be late: its gradients are dropped, and it gets the new weights."""

    def work(exchange, rank):
        model = Model(START)
        exchange.begin(model.weights.data, 0, 3)
        for grad in grads(rank, 20 if rank < 2 else 3):
            if rank == 2:
                time.sleep(0.1)
            model.update(exchange, grad)
        exchange.end()
        return model.weights.detach()

    with Crew("param_server", 3, START, mode="sync", drop=1) as crew:
        crew.run(work)
        assert crew.servers[0].metrics()["exchange/dropped"] >= 1
        assert crew.servers[0].version >= 20


def test_only_as_many_of_the_crew_are_dropped_as_was_said():
    """One of 3 may be dropped; when one is gone, the other two are both waited for."""

    def work(exchange, rank):
        model = Model(START)
        exchange.begin(model.weights.data, 0, 3)
        if rank == 2:
            exchange.leave()
            return
        time.sleep(0.2)
        for grad in grads(rank, 10):
            time.sleep(0.01 * rank)
            model.update(exchange, grad)
        exchange.end()

    with Crew("param_server", 3, START, mode="sync", drop=1) as crew:
        crew.run(work)
        assert crew.servers[0].metrics()["exchange/dropped"] == 0
        assert crew.servers[0].version == 10


def test_what_is_dropped_is_sent_again_where_errors_are_fed_back():
    model = Model(torch.zeros(100), sgd)
    with Crew("param_server", 2, torch.zeros(100), mode="sync", drop=1, compress="topk:0.1", optimizer=sgd) as crew:
        for rank in (0, 1):
            crew.join(rank)
        first, late = crew.exchanges
        threads = [threading.Thread(target=e.begin, args=(model.weights.data, 0, 2)) for e in (first, late)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        model.update(first, torch.ones(100))
        grad = torch.zeros(100)
        grad[7] = 5.0
        model.update(late, grad)  # by weights that are not the newest any more
        before = crew.servers[0].state()["parts"][0]["weights"][7]
        model.update(late, torch.zeros(100))
        assert crew.servers[0].metrics()["exchange/dropped"] == 1
        assert crew.servers[0].state()["parts"][0]["weights"][7] == pytest.approx(before - 0.01 * 5.0)


def test_a_gradient_that_is_not_finite_is_not_sent_and_holds_nobody_up():
    def work(exchange, rank):
        model = Model(START, sgd)
        exchange.begin(model.weights.data, 0, 2)
        verdict = model.update(exchange, torch.full((1000,), float("nan") if rank else 1.0))
        exchange.end()
        return verdict

    with Crew("param_server", 2, START, mode="sync", optimizer=sgd) as crew:
        assert crew.run(work) == ["skip", "apply"]  # its learner looks at it, and reports
        np.testing.assert_allclose(crew.servers[0].state()["parts"][0]["weights"], START.numpy() - 0.01, rtol=1e-5)


def test_a_server_goes_on_from_the_state_of_another():
    model = Model(START)
    with Crew("param_server", 1, START, mode="async") as crew:
        crew.join(0)
        crew.exchanges[0].begin(model.weights.data, 0, 1)
        for grad in grads(0)[:10]:
            model.update(crew.exchanges[0], grad)
        state = crew.servers[0].state()
        crew.servers[0].close()
        with pytest.raises(PeerLost):
            model.update(crew.exchanges[0], grads(0)[10])
    with Crew("param_server", 1, torch.zeros(1000), mode="async") as crew:
        crew.servers[0].load(state)
        crew.join(0)
        crew.exchanges[0].begin(model.weights.data, 1, 1)
        for grad in grads(0)[10:]:
            model.update(crew.exchanges[0], grad)
        assert crew.servers[0].version == 20
    whole = Model(START)
    for grad in grads(0):
        whole.update(Local(), grad)
    assert torch.equal(model.weights.detach(), whole.weights.detach())


def test_a_learner_that_is_gone_is_not_waited_for():
    """In the middle of a synchronous round."""

    def work(exchange, rank):
        model = Model(START)
        exchange.begin(model.weights.data, 0, 3)
        for k, grad in enumerate(grads(rank)):
            if rank == 2 and k == 5:
                exchange.leave()
                return None
            model.update(exchange, grad)
        exchange.end()
        return model.weights.detach()

    with Crew("param_server", 3, START, mode="sync") as crew:
        one, other, _ = crew.run(work)
        assert crew.servers[0].version == 20
    assert torch.equal(one, other)


def test_strangers_are_not_let_in():
    with Crew("param_server", 1, START) as crew:
        crew.secret = bytes(32)
        crew.join(0)
        with pytest.raises(PeerLost):
            crew.exchanges[0].begin(START.clone(), 0, 1)


@pytest.mark.parametrize("kind", ["param_server", "gossip"])
def test_moments_of_observations_reach_everybody_once(kind):
    rows = [torch.from_numpy(np.random.default_rng(k).normal(k, 1 + k, (50, 4))) for k in range(3)]
    met = threading.Barrier(3)

    def work(exchange, rank):
        norm = ObsNorm(4)
        exchange.begin(START.clone(), 0, 3)
        for moments in exchange.share(norm.moments(rows[rank])):
            norm.merge(moments)
        met.wait(20)
        until = time.monotonic() + 10
        while norm.count < 150 and time.monotonic() < until:  # on their way
            for moments in exchange.share(norm.moments(rows[rank][:0])):
                norm.merge(moments)
        exchange.end()
        return norm

    with Crew(kind, 3, START) as crew:
        for norm in crew.run(work):
            assert int(norm.count) == 150
            np.testing.assert_allclose(norm.mean, torch.cat(rows).mean(0), rtol=1e-9)
            np.testing.assert_allclose(norm.squares / 150, torch.cat(rows).var(0, correction=0), rtol=1e-9)


# -- gossip -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("graph", ["ring", "exponential", "complete"])
def test_who_sends_and_who_receives_agree(graph, size):
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

    with Crew("gossip", 4, START, graph="exponential") as crew:
        assert crew.run(work) == [[1.5] * 4] * 4


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
    with Crew("gossip", 3, START, **options) as crew:
        results = crew.run(work)
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

    with Crew("gossip", 2, START, graph="ring") as crew:
        assert crew.run(work) == [[3.25, 0.0]] * 2


def test_a_learner_that_is_gone_is_left_out_of_gossip_and_can_come_back():
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

    with Crew("gossip", 3, START, graph="ring") as crew:
        began = time.monotonic()
        one, other, _ = crew.run(work)
        assert torch.isfinite(one).all()
        assert torch.isfinite(other).all()
        assert time.monotonic() - began < 45  # nobody's patience of a minute was used up
        for rank in range(2):
            crew.exchanges[rank].join([(HOST, other.port) for other in crew.exchanges[:2]], rank, 2)

        def again(exchange, rank):
            weights = [one, other][rank].clone()
            exchange.begin(weights, 1, 2)
            for _ in range(20):
                exchange.params(weights)
            exchange.end()
            return weights

        crew.size, crew.join = 2, lambda rank: None
        first, second = crew.run(again)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, (one + other) / 2)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_steps_stay_as_large_as_they_are_when_a_neighbour_is_gone(mode):
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

    with Crew("gossip", 2, START, mode=mode, graph="ring") as crew:
        steps, _ = crew.run(work)
    assert steps[-4:] == pytest.approx([1.0] * 4)


def test_who_nobody_sends_to_keeps_enough_weight_to_divide_by():
    def work(exchange, rank):
        weights = START.clone()
        exchange.begin(weights, 0, 2)
        for _ in range(50 if rank == 0 else 1):
            if rank == 1:
                time.sleep(0.3)
            exchange.params(weights)
        exchange.end()
        return exchange.metrics()["exchange/push_weight"], weights

    with Crew("gossip", 2, START, mode="async", graph="ring") as crew:
        (kept, weights), _ = crew.run(work)
    assert kept >= 0.25
    torch.testing.assert_close(weights, START, rtol=1e-4, atol=1e-4)
