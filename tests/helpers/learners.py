"""Several learners as threads, with any exchange."""

import threading

import torch

from corral.learn.exchange.all_reduce import AllReduce, open_store
from corral.learn.exchange.config import DataParallelConfig
from corral.learn.exchange.gossip import Gossip
from corral.learn.exchange.param_server import ParamServer
from corral.learn.exchange.param_server_process import ParamServerProcess, server_slices
from corral.learn.exchange.peers import new_secret
from corral.ops.optim import adam

HOST = "127.0.0.1"


class Learners:
    """Makes exchanges of one kind for `size` learners who have met; everything ends with the block."""

    def __init__(
        self, kind, size, start, *, mode="sync", lag=0, drop=0, servers=1, graph="exponential", compress="none",
        quantize=False, optimizer=None, groups=None,
    ):  # fmt: skip
        self.groups = groups or [slice(0, start.numel())]
        self.kind, self.size, self.start = kind, size, start.clone()
        self.config = DataParallelConfig(
            kind, f"ssp:{lag}" if mode == "ssp" else mode, servers, drop, graph, compress, quantize_weights=quantize
        )
        self.optimizer = optimizer or (lambda params: adam(params, 1e-2))
        self.secret, self.servers, self.exchanges = new_secret(), [], []

    def __enter__(self):
        if self.kind == "all_reduce":
            self.store = open_store(HOST)
            self.exchanges = [AllReduce(self.config, seed=k) for k in range(self.size)]
        elif self.kind == "gossip":
            self.exchanges = [Gossip(self.config, HOST, self.secret) for _ in range(self.size)]
        else:
            count = self.config.servers
            parts = [server_slices(group, count) for group in self.groups]
            optimizers = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer] * len(self.groups)
            self.servers = [
                ParamServerProcess(
                    [(self.start[slices[k]], optimizer) for slices, optimizer in zip(parts, optimizers, strict=True)],
                    self.config, HOST, self.secret,
                )
                for k in range(count)
            ]  # fmt: skip
            self.exchanges = [ParamServer(self.config, self.groups, k) for k in range(self.size)]
        return self

    def join(self, rank):
        exchange = self.exchanges[rank]
        if self.kind == "all_reduce":
            exchange.join(HOST, self.store.port, 1, rank, self.size, 20.0)
        elif self.kind == "gossip":
            exchange.join([(HOST, other.port) for other in self.exchanges], rank, 1)
        else:
            exchange.join([(HOST, server.port) for server in self.servers], self.secret, 20.0)

    def __exit__(self, *_):
        for exchange in self.exchanges:
            exchange.close()
        for server in self.servers:
            server.close()

    def run(self, work):
        """What `work(exchange, rank)` returns, for each of them, in threads of their own."""
        results = {}

        def member(rank):
            try:
                if self.kind == "all_reduce":  # all have to be there
                    self.join(rank)
                results[rank] = work(self.exchanges[rank], rank)
            except Exception as error:
                results[rank] = error

        if self.kind != "all_reduce":
            for rank in range(self.size):
                self.join(rank)
        threads = [threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
            assert not thread.is_alive(), "a learner hangs"
        for result in results.values():
            if isinstance(result, Exception):
                raise result
        return [results[rank] for rank in range(self.size)]


class Model:
    """Weights, their gradient and an optimizer: as much of a learner as an exchange sees."""

    def __init__(self, start, optimizer=None):
        self.weights = torch.nn.Parameter(start.clone())
        self.weights.grad = torch.zeros_like(start)
        self.optimizer = (optimizer or (lambda params: adam(params, 1e-2)))([self.weights])

    def update(self, exchange, grad, rows=1, lr=1e-2):
        self.weights.grad.copy_(grad)
        verdict = exchange.grads(self.weights.grad, rows, lr)
        if verdict == "apply":
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        if verdict != "stop":
            exchange.params(self.weights.data)
        return verdict
