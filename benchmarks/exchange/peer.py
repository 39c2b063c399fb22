"""One of two learners that time their updates: commands arrive on stdin, answers go to stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from corral.algos.base import ParamGroup
from corral.learn.exchange.all_reduce import open_store
from corral.learn.exchange.base import ExchangeSetup, GroupExchange, make_exchange
from corral.learn.exchange.config import DataParallelConfig
from corral.learn.exchange.param_server_process import ParamServerProcess
from corral.learn.weights import FlatParams

_TIMEOUT_S = 300.0
_GROUPS = [ParamGroup(lambda params: torch.optim.SGD(params, 1e-3), lambda progress: 1e-3)]
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "atari": lambda: nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3), nn.Linear(3136, 512), nn.Linear(512, 7)
    ),
    "cartpole": lambda: nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3)),
}
"""By name: the Nature network of Atari agents, with 1.7 million weights, and a small one with 9,000."""


class Side:
    """One exchange on one of the two machines; a parameter server runs on the first."""

    def __init__(
        self, config: DataParallelConfig, rank: int, host: str, secret: bytes, model: nn.Module, flat: FlatParams
    ):
        self._config, self._rank, self._secret, self._flat = config, rank, secret, flat
        self._exchange: GroupExchange = make_exchange(ExchangeSetup(config, model, _GROUPS, host, secret, rank))
        self._own: Any = None
        if rank == 0 and config.exchange == "all_reduce":
            self._own = open_store(host)
        if rank == 0 and config.exchange == "param_server":
            parts = [(flat.weights.detach(), group.optimizer) for group in _GROUPS]
            self._own = ParamServerProcess(parts, config, host, secret)
        self._turn = 0

    @property
    def port(self) -> int:
        """Port that the other learner connects to."""
        return int(self._own.port if self._own is not None else getattr(self._exchange, "port", 0))

    def join(self, hosts: list[str], ports: list[int]) -> None:
        """Connect to the other learner."""
        if self._config.exchange == "all_reduce":
            self._exchange.join(hosts[0], ports[0], 1, self._rank, 2, _TIMEOUT_S)
        elif self._config.exchange == "gossip":
            self._exchange.join(list(zip(hosts, ports, strict=True)), self._rank, 1)
        else:
            self._exchange.join([(hosts[0], ports[0])], self._secret, _TIMEOUT_S)

    def run(self, updates: int) -> dict[str, Any]:
        """Seconds of each update, and bytes per update."""
        flat, times = self._flat, []
        self._exchange.begin(flat.weights.data, self._turn, 2)
        self._turn += 1
        before = self._exchange.sent
        for _ in range(updates):
            flat.grad.normal_()
            start = time.perf_counter()
            if self._exchange.grads(flat.grad, 1, 1e-3) == "apply":
                flat.weights.data.sub_(flat.grad, alpha=1e-3)
            self._exchange.params(flat.weights.data)
            times.append(time.perf_counter() - start)
        sent = self._exchange.sent - before
        self._exchange.end()
        return {"times": times, "bytes": sent / updates}


def main() -> None:
    """Serve until stdin ends."""
    torch.set_num_threads(1)
    job = json.loads(sys.stdin.readline())
    torch.manual_seed(0)
    model = NETWORKS[job["network"]]()
    flat = FlatParams(model, _GROUPS)
    torch.manual_seed(1 + job["rank"])
    host = job["hosts"][job["rank"]]
    sides = [
        Side(DataParallelConfig(**case), job["rank"], host, bytes.fromhex(job["secret"]), model, flat)
        for case in job["cases"]
    ]
    _say({"ports": [side.port for side in sides]})
    ports = json.loads(sys.stdin.readline())
    for k, side in enumerate(sides):
        side.join(job["hosts"], [ports[0][k], ports[1][k]])
    _say({"weights": sum(p.numel() for p in model.parameters())})
    for line in sys.stdin:
        order = json.loads(line)
        _say(sides[order["case"]].run(order["updates"]))


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
