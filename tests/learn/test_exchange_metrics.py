"""The numbers of learners that share: what is added up, what is left for later, what is sent, and that none is lost."""

import contextlib
import os
import socket
import struct
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from helpers.exchange_nets import GROUPS, START
from helpers.learners import HOST, Learners, Model
from torch import nn

from corral.core.errors import UserError
from corral.learn.exchange import param_server, param_server_process
from corral.learn.exchange.all_reduce import _HEAD, AllReduce, _plain, open_store
from corral.learn.exchange.base import ExchangeSetup, PeerLost, make_exchange
from corral.learn.exchange.compress import Float32Codec, HalfCodec, Qsgd, Sign, TopK, find_compression
from corral.learn.exchange.config import DataParallelConfig
from corral.learn.weights import FlatParams

ROWS = [5, 1, 10]


class Net:
    """A network with its gradients in one tensor, as a learner has it: what torch's hooks see."""

    def __init__(self):
        conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.model = nn.Sequential(conv, nn.Linear(20, 30))
        self.flat = FlatParams(self.model, GROUPS)
        self.params = list(self.model.parameters())

    def put(self, grads):
        self.flat.grad.zero_()
        for param, grad in zip(self.params, grads, strict=True):
            param.grad.copy_(grad)

    def take(self):
        return [param.grad.clone() for param in self.params]

    def random(self, seed):
        """A gradient of full rank."""
        rng = torch.Generator().manual_seed(seed)
        return [torch.randn(param.shape, generator=rng) for param in self.params]


def reduced(sharing, size, work):
    """What `work(exchange, rank, net)` returns for learners whose exchanges a run would make."""
    with Learners("all_reduce", size, START) as learners:
        nets = [Net() for _ in range(size)]
        learners.exchanges[:] = [
            make_exchange(ExchangeSetup(sharing, net.model, GROUPS, HOST, learners.secret, k))
            for k, net in enumerate(nets)
        ]
        return learners.run(lambda exchange, rank: work(exchange, rank, nets[rank]))


# -- reductions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compress", "near"),
    [("topk:1.0", 1e-6), ("bf16", 4 * 2**-8), ("fp16", 4 * 2**-11), ("powersgd:2", 1e-6)],  # each rounds four times
)
def test_compressed_learners_equal_one_with_all_rows(compress, near):
    """Weighted by rows. PowerSGD begins with 10 whole updates."""

    def work(exchange, rank, net):
        seen = []
        for k in range(10):
            net.put(net.random(100 * rank + k))
            assert exchange.grads(net.flat.grad, ROWS[rank], 0.1) == "apply"
            seen.append(net.take())
        return seen

    results, net = reduced(DataParallelConfig(compress=compress), 3, work), Net()
    for k in range(10):
        parts = [net.random(100 * rank + k) for rank in range(3)]
        for i in range(len(net.params)):
            weighted = [n / sum(ROWS) * part[i].double() for n, part in zip(ROWS, parts, strict=True)]
            size = sum(part.abs() for part in weighted)
            for seen in results:
                assert ((seen[k][i] - sum(weighted)).abs() <= near * size + 1e-6).all()


@pytest.mark.parametrize("compress", ["bf16", "powersgd:2"])
def test_gradients_that_are_sums_add_up_in_fewer_bytes(compress):
    def work(exchange, rank, net):
        net.flat.grad.fill_(rank + 1.0)
        exchange.grads(net.flat.grad, 0, 0.1)
        return set(net.flat.grad.tolist())

    results = reduced(DataParallelConfig(compress=compress), 3, work)
    assert [sorted(values) for values in results] == [[pytest.approx(6.0, rel=2**-7)]] * 3


def test_powersgd_feeds_back_its_error():
    """A gradient that is always the same, and of full rank: over time its mean is sent, by default."""

    def work(exchange, rank, net):
        for _ in range(10):
            net.put(net.random(rank))
            exchange.grads(net.flat.grad, 1, 0.1)
        sums = [torch.zeros(param.shape) for param in net.params]
        for _ in range(50):
            net.put(net.random(rank))
            exchange.grads(net.flat.grad, 1, 0.1)
            for whole, grad in zip(sums, net.take(), strict=True):
                whole += grad
        return [whole / 50 for whole in sums], net.take()

    (means, last), _ = reduced(DataParallelConfig(compress="powersgd:2"), 2, work)
    wanted = [(one + other) / 2 for one, other in zip(Net().random(0), Net().random(1), strict=True)]
    assert torch.linalg.matrix_rank(last[2]) == 2  # one update is not it
    for mean, grad in zip(means, wanted, strict=True):
        assert (mean - grad).norm() < 0.2 * grad.norm()  # 0.7 and 0.8 without


@pytest.mark.parametrize("why", ["stop", "not finite", "gone"])
def test_failed_reduce_loses_its_own_gradient_only(why):
    store, results, met = open_store(HOST), {}, threading.Barrier(2)

    def work(rank):
        exchange = AllReduce(DataParallelConfig(compress="topk:0.5"))
        exchange.join(HOST, store.port, 1, rank, 2, 20.0)
        exchange.grads(torch.tensor([4.0, -3.0, 2.0, 1.0]), 1, 0.1)  # the last two are left for later
        met.wait(20)
        grad = torch.full((4,), 8.0)
        if rank == 0 and why == "gone":
            with pytest.raises(PeerLost):
                exchange.grads(grad, 1, 0.1)
        elif rank == 0:
            assert exchange.grads(grad, 1, 0.1) == ("stop" if why == "stop" else "apply")
            assert torch.isnan(grad).all()  # which the learner leaves out
        elif why == "gone":
            exchange.leave()
        else:
            exchange.grads(torch.full((4,), float("nan") if why == "not finite" else 0.0), 1, 0.1, stop=why == "stop")
        exchange.join(HOST, store.port, 2, rank, 2, 20.0)
        seen = []
        for _ in range(3):
            grad = torch.zeros(4)
            exchange.grads(grad, 1, 0.1)
            seen.append(grad.tolist())
        results[rank] = seen

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results[0] == results[1] == [[0.0, 0.0, 2.0, 1.0], [0.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("compress", ["topk:0.1", "powersgd:2"])
def test_a_gradient_too_large_for_its_norm_leaves_nothing_behind(compress):
    """Its numbers are finite, and squares of them are not: errors that are fed back would never be finite again."""

    def work(exchange, rank, net):
        for _ in range(12):
            net.put(net.random(rank))
            exchange.grads(net.flat.grad, 1, 0.1)
        net.flat.grad.fill_(3e19 if rank else 1.0)
        assert exchange.grads(net.flat.grad, 1, 0.1) == "apply"
        assert not torch.isfinite(net.flat.grad.norm())  # the learner leaves it out, and says so
        for _ in range(3):
            net.put(net.random(rank))
            exchange.grads(net.flat.grad, 1, 0.1)
        return float(net.flat.grad.norm())

    norms = reduced(DataParallelConfig(compress=compress), 2, work)
    assert all(norm < 1e3 for norm in norms), norms


def test_a_group_ends_in_the_thread_that_leaves_it():
    """Not in one of its own, which may still hold it after a hook, and would wait for itself: the process aborts."""
    where = []

    def work(exchange, rank, net):
        held = [exchange._group]
        weakref.finalize(held[0], lambda: where.append(threading.current_thread().name))
        threading.Thread(target=lambda: (time.sleep(0.2), held.clear()), name="its own", daemon=True).start()
        exchange.leave()
        return threading.current_thread().name

    assert sorted(reduced(DataParallelConfig(compress="powersgd:2"), 2, work)) == sorted(where)


def tcp_bytes():
    """Bytes that this process has sent, and that were received, by the TCP connections that are open."""
    sent = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed by now, or no TCP
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                    sent[link] = struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
    return sent


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what was sent")
@pytest.mark.parametrize("size", [2, 3])
def test_bytes_per_update_are_those_of_a_ring(size):
    count, updates, met, seen = 100_000, 5, threading.Barrier(size), []

    def work(exchange, rank):
        grad = torch.ones(count)
        exchange.grads(grad, 1, 0.1)
        for _ in range(2):
            if met.wait(20) == 0:
                time.sleep(0.1)  # until the last are received
                seen.append(tcp_bytes())
            met.wait(20)
            for _ in range(updates if len(seen) == 1 else 0):
                exchange.grads(grad, 1, 0.1)
        return exchange.metrics()["exchange/bytes_per_update"]

    with Learners("all_reduce", size, START) as learners:
        told = learners.run(work)
    ring = 4 * (count + _HEAD) * 2 * (size - 1) / size
    assert told == pytest.approx([ring] * size, rel=1e-6)
    sent = sum(seen[1][link] - seen[0][link] for link in seen[0].keys() & seen[1].keys())
    assert sent / updates / size == pytest.approx(ring, rel=0.01)


@pytest.mark.parametrize(
    ("stays_s", "patience_s", "says"),
    [(0, 20, "a worker disconnected"), (9, 1.5, "a worker did not respond within 1.5 s")],
)
def test_peer_lost_names_the_reason(stays_s, patience_s, says):
    store, noticed, met, lost = open_store(HOST), threading.Event(), threading.Barrier(2), []

    def work(rank):
        exchange = AllReduce()
        exchange.join(HOST, store.port, 1, rank, 2, patience_s)
        exchange.grads(torch.ones(100), 1, 0.1)
        met.wait(20)
        if rank:
            noticed.wait(stays_s)
            exchange.leave()
            return
        with pytest.raises(PeerLost) as caught:
            exchange.grads(torch.ones(100), 1, 0.1)
        lost.append(caught.value)
        noticed.set()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [str(error) for error in lost] == [says]
    assert isinstance(lost[0].__cause__, RuntimeError)
    assert "gloo" in str(lost[0].__cause__)


def test_missing_peer_is_not_reported_by_torch():
    store = open_store(HOST)
    with pytest.raises(PeerLost, match=r"^a worker did not respond within 0\.3 s$") as caught:
        AllReduce().join(HOST, store.port, 1, 0, 2, 0.3)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(PeerLost, match=r"^the rendezvous at 127\.0\.0\.1:9 cannot be reached$"):
        AllReduce().join(HOST, 9, 1, 0, 2, 0.3)


def test_other_errors_are_not_peer_lost():
    text = "[/__w/pytorch/gloo/allreduce.cc:12] Invalid scalar type\nframe #0"
    assert _plain(text, 1.0) == "the all-reduce failed: Invalid scalar type"


# -- codes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", ["1.5", "2.000001"])
def test_a_rank_is_a_whole_number(rank):
    with pytest.raises(UserError, match="the rank must be an integer, such as powersgd:2"):
        find_compression(f"powersgd:{rank}")
    assert find_compression("powersgd:3").rank == 3


@pytest.mark.parametrize(
    "codec",
    [
        Float32Codec(),
        HalfCodec(torch.float16),
        HalfCodec(torch.bfloat16),
        Qsgd(8),
        Sign(),
        TopK(0.1, Float32Codec()),
        TopK(0.1, HalfCodec(torch.bfloat16)),
    ],
    ids=["whole", "fp16", "bf16", "qsgd", "sign", "topk", "topk+bf16"],
)
def test_no_numbers_are_no_bytes(codec):
    code = codec.encode(np.zeros(0, np.float32), np.random.default_rng(0))
    assert (code.dtype, len(code)) == (np.uint8, 0)
    assert codec.decode(code, 0).shape == (0,)


@pytest.mark.parametrize("compress", ["none", "fp16", "bf16", "qsgd:8", "sign", "topk:0.5", "topk:0.5+bf16"])
def test_more_servers_than_there_is_work_for(compress):
    """10 weights are one slice of 16: the others have none."""
    with Learners("param_server", 1, START[:10], servers=3, compress=compress) as learners:
        learners.join(0)
        model = Model(START[:10])
        learners.exchanges[0].begin(model.weights.data, 0, 1)
        assert model.update(learners.exchanges[0], torch.ones(10)) == "skip"
        assert torch.isfinite(model.weights).all()
        assert not torch.equal(model.weights.detach(), START[:10])


# -- parameter server ---------------------------------------------------------------------------------------------


def test_gradient_with_infinite_norm_is_not_sent():
    """It cannot be clipped, and squares of it are not finite."""
    with Learners("param_server", 1, START) as learners:
        learners.join(0)
        model = Model(START)
        learners.exchanges[0].begin(model.weights.data, 0, 1)
        grad = torch.full((1000,), 3e19)
        assert learners.exchanges[0].grads(grad, 1, 0.1) == "apply"  # its learner looks at it, and reports
        np.testing.assert_array_equal(learners.servers[0].state()["parts"][0]["weights"], START.numpy())
        assert model.update(learners.exchanges[0], torch.ones(1000)) == "skip"
        assert torch.isfinite(model.weights).all()


def test_client_timeout_exceeds_server_timeout():
    assert param_server._TIMEOUT_S > param_server_process._TIMEOUT_S
