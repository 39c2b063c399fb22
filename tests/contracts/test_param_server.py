"""The parameter server: how far apart learners may be, what is dropped, and who is let in."""

import threading
import time

import numpy as np
import pytest
import torch
from helpers.gradients import START, grads, sgd
from helpers.learners import Learners, Model

from corral.learn.exchange.base import Exchange, PeerLost
from corral.nets.obs_norm import ObsNorm


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_lag_bounds_the_lead_over_the_slowest(lag):
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

    with Learners("param_server", 3, START, mode="ssp", lag=lag) as learners:
        learners.run(work)
        assert learners.servers[0].metrics()["exchange/lead_max"] <= lag
        if lag:  # it was made use of
            assert learners.servers[0].metrics()["exchange/lead_max"] == lag
    # What a learner counts comes after the server's word: it may be one behind, and one is under way.
    assert max(lead) <= lag + 2


def test_lag_bounds_the_lead_after_a_pause():
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

    with Learners("param_server", 2, START, mode="ssp", lag=2) as learners:
        made, _ = learners.run(work)
        assert (
            learners.servers[0].metrics()["exchange/staleness_max"] <= 4
        )  # the bound, and one under way on either side
    assert made <= 4


def test_unbounded_async_counts_stale_gradients():
    def work(exchange, rank):
        model = Model(START)
        exchange.begin(model.weights.data, 0, 2)
        for grad in grads(rank, 40 if rank == 0 else 4):
            if rank:
                time.sleep(0.05)
            model.update(exchange, 0.1 * grad)
        exchange.end()

    with Learners("param_server", 2, START, mode="async") as learners:
        learners.run(work)
        told = learners.servers[0].metrics()
        assert told["exchange/staleness_max"] > 4
        assert learners.servers[0].version == 44


def test_update_does_not_wait_for_droppable_learner():
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

    with Learners("param_server", 3, START, mode="sync", drop=1) as learners:
        learners.run(work)
        assert learners.servers[0].metrics()["exchange/dropped"] >= 1
        assert learners.servers[0].version >= 20


def test_at_most_drop_learners_are_dropped():
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

    with Learners("param_server", 3, START, mode="sync", drop=1) as learners:
        learners.run(work)
        assert learners.servers[0].metrics()["exchange/dropped"] == 0
        assert learners.servers[0].version == 10


def test_dropped_gradient_is_resent_with_error_feedback():
    model = Model(torch.zeros(100), sgd)
    with Learners(
        "param_server", 2, torch.zeros(100), mode="sync", drop=1, compress="topk:0.1", optimizer=sgd
    ) as learners:
        for rank in (0, 1):
            learners.join(rank)
        first, late = learners.exchanges
        threads = [threading.Thread(target=e.begin, args=(model.weights.data, 0, 2)) for e in (first, late)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        model.update(first, torch.ones(100))
        grad = torch.zeros(100)
        grad[7] = 5.0
        model.update(late, grad)  # by weights that are not the newest any more
        before = learners.servers[0].state()["parts"][0]["weights"][7]
        model.update(late, torch.zeros(100))
        assert learners.servers[0].metrics()["exchange/dropped"] == 1
        assert learners.servers[0].state()["parts"][0]["weights"][7] == pytest.approx(before - 0.01 * 5.0)


def test_not_finite_gradient_is_not_sent():
    def work(exchange, rank):
        model = Model(START, sgd)
        exchange.begin(model.weights.data, 0, 2)
        verdict = model.update(exchange, torch.full((1000,), float("nan") if rank else 1.0))
        exchange.end()
        return verdict

    with Learners("param_server", 2, START, mode="sync", optimizer=sgd) as learners:
        assert learners.run(work) == ["skip", "apply"]  # its learner looks at it, and reports
        np.testing.assert_allclose(learners.servers[0].state()["parts"][0]["weights"], START.numpy() - 0.01, rtol=1e-5)


class Group:
    """Learners with two parameter groups of 16 weights, which begin together and push when they are told."""

    def __init__(self, learners):
        self.exchanges, self.server = learners.exchanges, learners.servers[0]
        self.weights = [learners.start.clone() for _ in self.exchanges]
        for rank in range(learners.size):
            learners.join(rank)
        self.wait(*(self.start(rank, "begin", self.weights[rank], 0, learners.size) for rank in range(learners.size)))

    def start(self, rank, method, *args, **kwargs):
        thread = threading.Thread(target=getattr(self.exchanges[rank], method), args=args, kwargs=kwargs, daemon=True)
        thread.start()
        return thread

    def push(self, rank, group, grad=1.0):
        """A push that waits at the server, or has been answered, when this returns."""
        count, until = len(self.server._arrived), time.monotonic() + 20
        thread = self.start(rank, "grads", torch.full((16,), grad), 1, (0.1, 0.001)[group], group=group)
        while thread.is_alive() and len(self.server._arrived) == count and time.monotonic() < until:
            time.sleep(0.001)
        return thread

    def wait(self, *threads):
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a push is not answered"

    def steps(self):
        """The steps that each group's weights have made."""
        return [float(-part["weights"].mean()) for part in self.server.state()["parts"]]


GROUPS = {"groups": [slice(0, 16), slice(16, 32)], "optimizer": sgd}


def test_group_is_stepped_with_its_learning_rate():
    """A learner leaves out its second group, so that two are at different groups."""
    with Learners("param_server", 2, torch.zeros(32), **GROUPS) as learners:
        group = Group(learners)
        group.wait(group.push(0, 0), group.push(1, 0))
        ahead = group.push(0, 0, 3.0)
        group.wait(group.push(1, 1))
        assert group.steps() == pytest.approx([0.1, 0.001])
        group.wait(ahead, group.push(1, 0))
        assert group.steps() == pytest.approx([0.1 + 0.1 * (3.0 + 1.0) / 2, 0.001])
        assert float(group.weights[0][16]) == pytest.approx(-0.001)  # the update of the group that it left out
        group.wait(group.push(0, 1), group.push(1, 1))
        assert group.steps()[1] == pytest.approx(0.002)
        assert group.server.metrics()["exchange/dropped"] == 0


def test_late_gradient_of_a_later_group_is_dropped():
    with Learners("param_server", 3, torch.zeros(32), drop=1, **GROUPS) as learners:
        group = Group(learners)
        for k in (0, 1):
            group.wait(group.push(0, k), group.push(1, k))
        for k in (0, 1):
            group.wait(group.push(2, k, 100.0))
        group.wait(group.push(0, 0, 2.0), group.push(1, 0, 4.0))
        assert group.steps() == pytest.approx([0.1 + 0.1 * 3.0, 0.001])
        assert group.server.metrics()["exchange/dropped"] == 2


def test_gradient_of_another_group_does_not_finish_a_round():
    """The third learner is at the second group, and no place in the round of the first one is its."""
    with Learners("param_server", 3, torch.zeros(32), drop=1, **GROUPS) as learners:
        group = Group(learners)
        for k in (0, 1):
            group.wait(group.push(0, k), group.push(1, k))
        group.wait(group.push(2, 1))  # late: it gets the newest weights of that group
        ahead = group.push(2, 1, 3.0)
        group.wait(group.push(0, 0, 2.0), group.push(1, 0, 4.0))
        assert group.steps() == pytest.approx([0.4, 0.001])
        group.wait(group.push(0, 1, 5.0), ahead)
        assert group.steps() == pytest.approx([0.4, 0.001 + 0.001 * 4.0])


def test_learner_at_a_group_others_leave_out_does_not_wait():
    with Learners("param_server", 3, torch.zeros(32), drop=1, **GROUPS) as learners:
        group = Group(learners)
        group.wait(group.push(0, 0), group.push(1, 0))
        alone = group.push(2, 1)
        group.wait(group.push(0, 0), group.push(1, 0), alone)
        assert group.steps() == pytest.approx([0.2, 0.001])


def test_learners_at_two_groups_do_not_wait_for_a_lost_one():
    with Learners("param_server", 3, torch.zeros(32), **GROUPS) as learners:
        group = Group(learners)
        group.wait(*[group.push(rank, 0) for rank in range(3)])
        ahead, behind = group.push(0, 0), group.push(1, 1)
        learners.exchanges[2].leave()
        group.wait(behind, group.push(1, 0), ahead)
        assert group.steps() == pytest.approx([0.2, 0.001])


def test_server_continues_from_state():
    model = Model(START)
    with Learners("param_server", 1, START, mode="async") as learners:
        learners.join(0)
        learners.exchanges[0].begin(model.weights.data, 0, 1)
        for grad in grads(0)[:10]:
            model.update(learners.exchanges[0], grad)
        state = learners.servers[0].state()
        learners.servers[0].close()
        with pytest.raises(PeerLost):
            model.update(learners.exchanges[0], grads(0)[10])
    with Learners("param_server", 1, torch.zeros(1000), mode="async") as learners:
        learners.servers[0].load(state)
        learners.join(0)
        learners.exchanges[0].begin(model.weights.data, 1, 1)
        for grad in grads(0)[10:]:
            model.update(learners.exchanges[0], grad)
        assert learners.servers[0].version == 20
    whole = Model(START)
    for grad in grads(0):
        whole.update(Exchange(), grad)
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

    with Learners("param_server", 3, START, mode="sync") as learners:
        one, other, _ = learners.run(work)
        assert learners.servers[0].version == 20
    assert torch.equal(one, other)


def test_strangers_are_not_let_in():
    with Learners("param_server", 1, START) as learners:
        learners.secret = bytes(32)
        learners.join(0)
        with pytest.raises(PeerLost):
            learners.exchanges[0].begin(START.clone(), 0, 1)


@pytest.mark.parametrize("kind", ["param_server", "gossip"])
def test_observation_moments_reach_each_learner_once(kind):
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

    with Learners(kind, 3, START) as learners:
        for norm in learners.run(work):
            assert int(norm.count) == 150
            np.testing.assert_allclose(norm.mean, torch.cat(rows).mean(0), rtol=1e-9)
            np.testing.assert_allclose(norm.squares / 150, torch.cat(rows).var(0, correction=0), rtol=1e-9)
