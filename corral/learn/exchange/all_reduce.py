"""All-reduce: learners make every update together, each from its own data, and keep identical weights.

Compressed reductions (fp16, bf16, PowerSGD) use the communication hooks of torch's `DistributedDataParallel`, but not
DDP itself: its reducer waits for autograd, from which the gradients of small networks do not come here. The hooks get
one bucket that contains all gradients.
"""

from __future__ import annotations

import logging
import math
import re
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from corral.learn.exchange.base import ExchangeSetup, GradAction, GroupExchange, PeerLost
from corral.learn.exchange.compress import Compress, Compression, find_compression, make_compression
from corral.learn.exchange.config import DataParallelConfig
from corral.learn.exchange.peers import own_address
from corral.learn.weights import split_params

_WHOLE_FIRST = 10  # full-precision updates before PowerSGD starts, as its authors do: early gradients are atypical


def _bucket(grad: Tensor, params: Sequence[nn.Parameter]) -> Any:
    """The subset of DDP's gradient bucket that the hooks use; there is only one bucket."""
    grads = [param.grad for param in params if param.grad is not None]
    in_memory_order = [each if each.is_contiguous() else each.permute(0, 2, 3, 1) for each in grads]
    return SimpleNamespace(
        buffer=lambda: grad, gradients=lambda: in_memory_order, index=lambda: 0, is_last=lambda: True
    )


class HookedReduction:
    """Averages gradients over all learners in place; the gradients of `params` are views of the flat gradient."""

    def __init__(self, compress: Compress, group: Any, params: Sequence[nn.Parameter]):
        self._params = params
        self._power: Any = None
        if compress.hook == "powersgd":
            logging.getLogger(powerSGD_hook.__name__).setLevel(logging.WARNING)
            self._power = powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=compress.rank, start_powerSGD_iter=_WHOLE_FIRST,
                min_compression_rate=1.0, use_error_feedback=True,
            )  # fmt: skip
            self._reduce, self._state = powerSGD_hook.powerSGD_hook, self._power
        else:
            self._reduce, self._state = getattr(default_hooks, f"{compress.hook}_compress_hook"), group

    def reduce(self, grad: Tensor) -> float:
        """Returns the number of bytes that were reduced."""
        before = 0 if self._power is None else self._power.total_numel_after_compression
        grad.copy_(self._reduce(self._state, _bucket(grad, self._params)).wait())
        if self._power is None:
            return 2.0 * grad.numel()
        return 4.0 * (int(self._power.total_numel_after_compression - before) or grad.numel())


_dist: Any = distributed  # the stubs are incomplete
_HEAD = 4  # numbers sent with each gradient: rows, stop, last, not finite
_DROP_S = 5.0


class AllReduce(GroupExchange):
    """The mean gradient of all learners, weighted by their rows, in one reduction per update.

    `grad = sum_k n_k grad_k / sum_k n_k`, or `sum_k grad_k` for losses that are sums. Works alone until `join`.

    Groups change with their members, and in tests several learners are threads of one process, so this creates its own
    process groups instead of torch's single global one. With compression, torch's hooks do the reduction where one
    exists; other codes cannot be summed, so they are gathered and every learner sums the same decoded gradients.
    """

    rendezvous = "corral.topologies.rendezvous:AllReduceRendezvous"

    @classmethod
    def make(cls, setup: ExchangeSetup) -> AllReduce:
        return cls(setup.config, split_params(setup.model, setup.groups), setup.seed)

    def __init__(
        self, config: DataParallelConfig | None = None, params: Sequence[Sequence[nn.Parameter]] = (), seed: int = 0
    ):
        self._config, self._seed = config or DataParallelConfig(), seed
        self._compress = find_compression(self._config.compress)
        self._params = params  # per group
        self._compressions: dict[int, Compression] = {}  # by group
        self._hooked: dict[int, HookedReduction] = {}
        self._group: Any = None
        self._store: Any = None
        self._buffers: dict[int, Tensor] = {}
        self._size = 1
        self._timeout_s = 0.0
        self.over = False
        self._updates = 0
        self.sent = 0.0

    def join(self, host: str, port: int, group: int, rank: int, size: int, timeout_s: float) -> None:
        """Join the group of `size` members as `rank`, at the store on `host:port`.

        Raises PeerLost if the others do not join within `timeout_s`, which is also the timeout of later updates.
        """
        self.leave()
        self._size, self._timeout_s = size, timeout_s
        if size == 1:
            return
        timeout = timedelta(seconds=timeout_s)
        try:
            self._store = _dist.TCPStore(host, port, None, False, timeout)
        except (RuntimeError, OSError) as error:
            self.leave()
            raise PeerLost(f"the rendezvous at {host}:{port} cannot be reached") from error
        try:
            options = _dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            # By default gloo listens on the address of the host name, which on many laptops cannot be reached.
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=own_address(host, port))]
            self._group = _dist.ProcessGroupGloo(_dist.PrefixStore(str(group), self._store), rank, size, options)
        except (RuntimeError, OSError) as error:
            raise self._lost(error) from error

    def leave(self) -> None:
        group = self._group
        self._group = self._store = None
        self._hooked = {}
        self._size = 1
        # After a reduction, gloo's own threads may still hold PowerSGD's continuation, and with it the group. If one of
        # these threads dropped the last reference, it would wait for itself, which aborts the process.
        until = time.monotonic() + _DROP_S
        while group is not None and sys.getrefcount(group) > 2 and time.monotonic() < until:
            time.sleep(0.001)

    def metrics(self) -> dict[str, float]:
        """Bytes that this learner sends per update, as in gloo's ring algorithms."""
        return {"exchange/bytes_per_update": self.sent / max(1, self._updates)}

    def agree(self, ready: bool) -> bool:
        if self._size == 1:
            return ready
        count = torch.tensor([float(ready)])
        self._reduce(count)
        return int(count.item()) == self._size

    def grads(
        self, grad: Tensor, rows: int, lr: float, *, group: int = 0, stop: bool = False, last: bool = False
    ) -> GradAction:
        self.over = False
        if self._size == 1:
            return "stop" if stop else "apply"
        self._updates += 1
        if self._compress is None:
            return self._reduce_whole(grad, group, rows, stop, last)
        if self._compress.hook is None:
            return self._gather_codes(grad, group, rows, stop, last)
        return self._reduce_hooked(self._compress, grad, group, rows, stop, last)

    def _reduce_whole(self, grad: Tensor, group: int, rows: int, stop: bool, last: bool) -> GradAction:
        count = grad.numel()
        if group not in self._buffers or self._buffers[group].numel() != count + _HEAD:
            self._buffers[group] = torch.zeros(count + _HEAD)
        buffer = self._buffers[group]
        buffer[:count].copy_(grad)
        if rows:
            buffer[:count].mul_(rows)
        buffer[count:] = torch.tensor([rows, stop, last, 0.0])
        self._reduce(buffer)
        total, stopped, over, _ = buffer[count:].tolist()
        self.over = bool(over)
        if stopped:
            return "stop"
        if total:
            buffer[:count].div_(total)
        grad.copy_(buffer[:count])
        return "apply"

    def _gather_codes(self, grad: Tensor, group: int, rows: int, stop: bool, last: bool) -> GradAction:
        own = grad.detach().cpu().numpy()
        if group not in self._compressions or self._compressions[group].count != len(own):
            self._compressions[group] = make_compression(self._config, len(own), self._seed + group)
        compression, finite = self._compressions[group], _usable(grad)
        code = compression.pack(own) if finite and not stop else compression.blank()
        head = np.array([rows, stop, last, not finite], np.float32)
        try:
            messages = self._gather(torch.from_numpy(np.concatenate([head.view(np.uint8), code])))
        except PeerLost:
            if finite and not stop:
                compression.discard_pack()
            raise
        heads = np.stack([m[: 4 * _HEAD].numpy().view(np.float32) for m in messages])
        total, stopped, over, bad = heads.sum(0)
        self.over = bool(over)
        if stopped or bad:
            if finite and not stop:
                compression.discard_pack()  # not used by any learner
            grad.fill_(float("nan"))
            return "stop" if stopped else "apply"
        mean = np.zeros(len(own), np.float32)
        for (n, *_), message in zip(heads, messages, strict=True):
            part = compression.unpack(message[4 * _HEAD :].numpy())
            mean += part * n if total else part
        grad.copy_(torch.from_numpy(mean / total if total else mean))
        return "apply"

    def _reduce_hooked(
        self, compress: Compress, grad: Tensor, group: int, rows: int, stop: bool, last: bool
    ) -> GradAction:
        if group not in self._hooked:
            self._hooked[group] = HookedReduction(compress, self._group, self._params[group])
        head = torch.tensor([rows, stop, last, not _usable(grad)], dtype=torch.float32)
        self._reduce(head)
        total, stopped, over, bad = head.tolist()
        self.over = bool(over)
        if stopped or bad:
            grad.fill_(float("nan"))
            return "stop" if stopped else "apply"
        grad.mul_(rows * self._size / total if total else self._size)  # the hooks divide by the number of learners
        try:
            reduced = self._hooked[group].reduce(grad)
        except RuntimeError as error:
            raise self._lost(error) from error
        self.sent += self._ring(reduced)
        return "apply"

    def share(self, values: Tensor) -> list[Tensor]:
        if self._size == 1:
            return [values]
        return [each.to(values.device) for each in self._gather(values.detach().cpu().contiguous())]

    def _ring(self, size: float) -> float:
        """Bytes that one member sends to reduce `size` bytes."""
        return 2 * (self._size - 1) / self._size * size

    def _reduce(self, buffer: Tensor) -> None:
        self.sent += self._ring(4 * buffer.numel())
        self._wait("allreduce", [buffer])

    def _gather(self, own: Tensor) -> list[Tensor]:
        self.sent += (self._size - 1) * own.numel() * own.element_size()
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        self._wait("allgather", [gathered], [own])
        return gathered

    def _wait(self, operation: str, *args: Any) -> None:
        try:
            if self._group is None:
                raise RuntimeError("the group is closed")
            getattr(self._group, operation)(*args).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError | OSError) -> PeerLost:
        self.leave()
        return PeerLost(_plain(str(error), self._timeout_s))


def _usable(grad: Tensor) -> bool:
    """Whether the norm is finite: otherwise error feedback would carry non-finite values forever."""
    return math.isfinite(float(grad.norm()))


def open_store(host: str) -> Any:
    """The TCP store at which learners meet; its `port` attribute is the port on this host.

    It listens at this address only, on one machine the loopback device; torch's own socket would listen at all.
    """
    timeout = timedelta(seconds=60)
    if sys.platform == "win32":  # where torch does not take a socket
        return _dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
    listener = socket.create_server((host, 0))
    port, descriptor = listener.getsockname()[1], listener.detach()
    return _dist.TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


def _plain(text: str, timeout_s: float) -> str:
    """A readable message for a gloo error, whose own text names source files; the error remains as the cause."""
    if re.search(r"timed? ?out", text, re.IGNORECASE):
        return f"a worker did not respond within {timeout_s:g} s"
    if re.search(r"peer|closed|connect|socket|broken pipe|(read|write) error", text, re.IGNORECASE):
        return "a worker disconnected"
    return "the all-reduce failed: " + re.sub(r"^\[[^]]*\] *", "", text.strip()).partition("\n")[0]
