"""What `python -m benchmarks exchange` measures: seconds per update of every exchange and compression.

Two learners on two machines, which are network namespaces of this one; nothing is computed except the exchange.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.rounds import Spread
from benchmarks.exchange.slow_link import ADDRESSES, SlowLink
from corral.core.errors import RunFailed
from corral.learn.exchange.peers import new_secret

_TIMEOUT_S = 600.0
_SERVER = {"exchange": "param_server"}
_GOSSIP = {"exchange": "gossip", "gossip_graph": "ring"}
CASES: dict[str, dict[str, Any]] = {
    "all_reduce": {},
    "all_reduce fp16": {"compress": "fp16"},
    "all_reduce qsgd:8": {"compress": "qsgd:8"},
    "all_reduce sign": {"compress": "sign"},
    "all_reduce powersgd:2": {"compress": "powersgd:2"},
    "all_reduce topk:0.01": {"compress": "topk:0.01"},
    "all_reduce topk:0.01+qsgd:8": {"compress": "topk:0.01+qsgd:8"},
    "param_server": _SERVER,
    "param_server fp16": {**_SERVER, "compress": "fp16"},
    "param_server topk:0.01": {**_SERVER, "compress": "topk:0.01"},
    "param_server topk:0.01, weights in 8 bits": {**_SERVER, "compress": "topk:0.01", "quantize_weights": True},
    "gossip": _GOSSIP,
    "gossip, weights in 8 bits": {**_GOSSIP, "quantize_weights": True},
}
"""By name: settings of `DataParallelConfig`."""
_WARM_UP = 12  # updates before measuring: PowerSGD sends the first ten uncompressed


@dataclass(frozen=True)
class Cell:
    """One case at one link rate."""

    case: str
    mbit: float
    """Megabits per second of the link; 0: not throttled."""
    seconds: Spread
    bytes_per_update: float


class Pair:
    """Two learners that wait for commands, one on each side of a link."""

    def __init__(self, link: SlowLink, network: str, cases: Sequence[dict[str, Any]]):
        self._peers = [
            subprocess.Popen(
                link.command(side, [sys.executable, "-m", "benchmarks.exchange.peer"]),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
            )
            for side in (0, 1)
        ]  # fmt: skip
        secret = new_secret().hex()
        for rank in (0, 1):
            job = {"rank": rank, "hosts": ADDRESSES, "network": network, "cases": list(cases), "secret": secret}
            self._tell(rank, job)
        ports = [self._hear(rank)["ports"] for rank in (0, 1)]
        for rank in (0, 1):
            self._tell(rank, ports)
        self.weights = max(self._hear(rank)["weights"] for rank in (0, 1))

    def run(self, case: int, updates: int) -> tuple[list[float], float]:
        """Seconds of each update for the slower learner, and bytes per update of the second one."""
        for rank in (0, 1):
            self._tell(rank, {"case": case, "updates": updates})
        answers = [self._hear(rank) for rank in (0, 1)]
        return [max(pair) for pair in zip(*(answer["times"] for answer in answers), strict=True)], answers[1]["bytes"]

    def _tell(self, rank: int, value: Any) -> None:
        stdin = self._peers[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(value) + "\n")
        stdin.flush()

    def _hear(self, rank: int) -> Any:
        stdout = self._peers[rank].stdout
        assert stdout is not None
        if not select.select([stdout], [], [], _TIMEOUT_S)[0]:
            raise RunFailed(f"A learner did not answer within {_TIMEOUT_S:.0f} s.")
        line = stdout.readline()
        if not line:
            raise RunFailed("A learner has ended; its error is printed above.")
        return json.loads(line)

    def close(self) -> None:
        for peer in self._peers:
            peer.kill()
            peer.communicate()


def measure(network: str, rates: Sequence[float], rounds: int, say: Callable[[str], None]) -> tuple[int, list[Cell]]:
    """Interleaved rounds of one update per case, rate by rate; returns the number of weights, and the cells."""
    cells, names = [], list(CASES)
    with SlowLink() as link:
        pair = Pair(link, network, list(CASES.values()))
        try:
            for k in range(len(names)):
                say(f"warming up {names[k]}")
                pair.run(k, _WARM_UP)
            for mbit in rates:
                link.rate(mbit)
                times: list[list[float]] = [[] for _ in names]
                sizes = [0.0] * len(names)
                for number in range(rounds):
                    for k, name in enumerate(names):
                        say(f"{mbit:g} Mbit/s, round {number + 1} of {rounds}: {name}" if mbit else f"{name}")
                        seconds, sizes[k] = pair.run(k, 1)
                        times[k] += seconds
                cells += [Cell(name, mbit, Spread.of(times[k]), sizes[k]) for k, name in enumerate(names)]
            return pair.weights, cells
        finally:
            pair.close()
