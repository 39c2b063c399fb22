"""Several learners that make every update together, each from its own data, so that all keep the same weights."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from corral.learn.exchange.contract import Verdict

_dist: Any = distributed  # its stubs leave out half of it


class PeerLost(Exception):
    """Another learner is gone, or has not come to an update in time; the group is closed."""


class AllReduce:
    """The mean gradient of all learners, weighted by their rows, in one reduction per update.

    `grad = sum_k n_k grad_k / sum_k n_k`, or `sum_k grad_k` of losses that are sums. Alone until `join`.

    Groups come and go with their members, and several learners may be threads of one process (in tests), so this has
    process groups of its own instead of torch's one group per process.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._store: Any = None
        self._buffer = torch.zeros(0)
        self._size = 1
        self.over = False

    def join(self, host: str, port: int, group: int, rank: int, size: int, timeout_s: float) -> None:
        """Meet the others at the store of `host:port`, as member `rank` of `size` of this group.

        PeerLost when they do not come in time, which is also how long later updates wait for them.
        """
        self.leave()
        self._size = size
        if size == 1:
            return
        patience = timedelta(seconds=timeout_s)
        try:
            self._store = _dist.TCPStore(host, port, None, False, patience)
            options = _dist.ProcessGroupGloo._Options()
            options._timeout = patience
            # By default gloo listens where the machine's own name leads, which is nowhere on many a laptop.
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=_own_address(host, port))]
            self._group = _dist.ProcessGroupGloo(_dist.PrefixStore(str(group), self._store), rank, size, options)
        except (RuntimeError, OSError) as error:
            self.leave()
            raise PeerLost(_first_line(error)) from error

    def leave(self) -> None:
        """Close the group; others that wait for this learner notice."""
        self._group = self._store = None
        self._size = 1

    def grads(self, grad: Tensor, rows: int, *, stop: bool = False, last: bool = False) -> Verdict:
        """Reduce."""
        self.over = False
        if self._size == 1:
            return "stop" if stop else "apply"
        count = grad.numel()
        if self._buffer.numel() != count + 3:
            self._buffer = torch.zeros(count + 3)
        buffer = self._buffer
        buffer[:count].copy_(grad)
        if rows:
            buffer[:count].mul_(rows)
        buffer[count], buffer[count + 1], buffer[count + 2] = rows, stop, last
        self._wait("allreduce", [buffer])
        total, stopped, over = buffer[count:].tolist()
        self.over = bool(over)
        if stopped:
            return "stop"
        if total:
            buffer[:count].div_(total)
        grad.copy_(buffer[:count])
        return "apply"

    def params(self, weights: Tensor) -> None:
        """They are the same everywhere."""

    def share(self, values: Tensor) -> list[Tensor]:
        """Gather."""
        if self._size == 1:
            return [values]
        own = values.detach().cpu().contiguous()
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        self._wait("allgather", [gathered], [own])
        return [each.to(values.device) for each in gathered]

    def _wait(self, operation: str, *args: Any) -> None:
        try:
            if self._group is None:
                raise RuntimeError("the group is closed")
            getattr(self._group, operation)(*args).wait()
        except RuntimeError as error:
            self.leave()
            raise PeerLost(_first_line(error)) from error


def open_store(host: str) -> Any:
    """Where learners meet; `port` says at which port of this host."""
    return _dist.TCPStore(host, 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def _own_address(host: str, port: int) -> str:
    """The address of this machine by which it reaches that host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
