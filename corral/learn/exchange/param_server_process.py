"""A parameter server: receives gradients and returns weights.

`sync`: an update is the mean of all workers, and all wait for it; with `backup_workers` it does not wait for the
slowest few, whose late gradients are dropped (Heess et al. 2017). `async`: every gradient is an update (Mnih et al.
2016). `ssp`: as async, but a worker more than `staleness` updates ahead of the slowest waits (Ho et al. 2013).

Each parameter group has its own updates: a round of `sync` applies the gradients of one group, and a gradient is late
if its group was updated after the worker received that group's weights. Workers may be at different groups, because one
left out a gradient or stopped early: then the groups take turns, and a worker ahead waits for the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corral.core.encoding import DecodeError, Value, decode, encode
from corral.core.types import Array
from corral.learn.exchange.compress import broadcast_codec, gradient_codec
from corral.learn.exchange.config import DataParallelConfig
from corral.learn.exchange.peers import Listener
from corral.learn.weights import to_arrays, to_tensors
from corral.nets.obs_norm import merged
from corral.ops.optim import Optimizer
from corral.runtimes.connection import Connection, ConnectionClosed

ENTER, PUSH, SHARE, REST = range(4)
_TIMEOUT_S = 600.0  # for a silent worker that is still connected: a slow simulator, or a long update
_SEND_S = 60.0
_WORKERS_S = 10.0  # for all workers to begin a turn
_QUIET_S = 900.0  # seconds without a message before a member is disconnected


class _Member:
    """A connected learner."""

    def __init__(self, groups: int) -> None:
        self.received = [0] * groups  # updates of each group in the weights that it has
        self.clock: int | None = None  # its own updates; None while it rests: others do not wait for it
        self.kept = 0  # its clock when it began to rest
        self.new_moments: Array | None = None  # moments of observations from other learners
        self.complete = True  # whether all began its turn together


@dataclass(frozen=True, eq=False)
class _Push:
    """A gradient that waits for the others of its group; None if it was not finite."""

    group: int
    grad: Array | None
    rows: int
    lr: float


class _GroupPart:
    """The server's slice of one parameter group, with its optimizer."""

    def __init__(self, weights: Tensor, optimizer: Callable[[list[Tensor]], Optimizer]):
        self.weights = nn.Parameter(weights.detach().clone())
        self.weights.grad = torch.zeros_like(self.weights)
        self.optimizer = optimizer([self.weights])
        self.updates = 0
        self.coded: tuple[int, Value] | None = None  # number of updates, and the encoded weights after them

    def apply(self, grad: Array, lr: float) -> None:
        assert self.weights.grad is not None
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.weights.grad.copy_(torch.from_numpy(grad))
        self.optimizer.step()
        self.updates += 1

    def state(self) -> dict[str, Value]:
        optimizer = self.optimizer.state_dict()["state"].get(0, {})
        return {"weights": to_arrays(self.weights), "optimizer": to_arrays(optimizer)}

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.weights.copy_(to_tensors(state["weights"]))
        whole, optimizer = self.optimizer.state_dict(), to_tensors(state["optimizer"])
        whole["state"] = {0: optimizer} if optimizer else {}
        self.optimizer.load_state_dict(whole)
        self.coded = None


class ParamServerProcess:
    """Serves a slice of every parameter group's weights, with that slice of the optimizer state."""

    def __init__(
        self, parts: Sequence[tuple[Tensor, Callable[[list[Tensor]], Optimizer]]], config: DataParallelConfig,
        host: str, secret: bytes,
    ):  # fmt: skip
        self._parts = [_GroupPart(weights, optimizer) for weights, optimizer in parts]
        self._mode, self._staleness = config.rule
        self._backup_workers = config.backup_workers
        self._codec, self._broadcast = gradient_codec(config), broadcast_codec(config)
        self._rng = np.random.default_rng(0)
        self._change = threading.Condition()
        self._members: set[_Member] = set()
        self._arrived: dict[_Member, _Push] = {}  # with `sync`, in order of arrival
        self._next_group = 0  # the group after that of the last round
        self._num_workers = 1  # that begin a turn together
        self._coming: set[_Member] = set()  # members waiting for the others to begin a turn
        self.version = 0
        """Updates of the first group so far."""
        self._closed = False
        self._pushes = self._dropped = self._stale = self._stalest = self._lead = self._timeouts = 0
        self._error = 0.0
        self._listener = Listener(host, secret, self._serve, _SEND_S)
        self.port = self._listener.port

    def _serve(self, connection: Connection) -> None:
        member = _Member(len(self._parts))
        with self._change:
            self._members.add(member)
        try:
            with contextlib.suppress(ConnectionClosed, DecodeError, KeyError, ValueError, TypeError):
                while not self._closed and (frame := connection.read(wait=True, timeout_s=_QUIET_S)):
                    kind, _, body = frame
                    if kind == REST:
                        self._rest(member)
                        continue
                    answer = {ENTER: self._enter, PUSH: self._push, SHARE: self._share}[kind](member, decode(body))
                    connection.send(kind, 0, encode(answer))
        finally:
            connection.close()
            with self._change:
                self._members.discard(member)
                self._coming.discard(member)
            self._rest(member)

    def _enter(self, member: _Member, message: dict[str, Any]) -> Value:
        """Begin a turn: return the current weights and set the member's clock. With `sync`, wait for all workers."""
        with self._change:
            self._coming.add(member)
            if self._mode == "sync" and len(self._coming) < message["num_workers"]:
                self._change.wait_for(lambda: member not in self._coming or self._closed, _WORKERS_S)
            if member in self._coming:
                in_step = self._mode == "sync"
                together = self._coming if in_step else {member}
                for other in together:
                    self._wake(other)
                    other.complete = not in_step or len(together) >= message["num_workers"]
                self._num_workers = message["num_workers"]
                self._coming -= set(together)
                self._change.notify_all()
            member.received = [-1] * len(self._parts)
            return {"weights": self._newer(member, range(len(self._parts))), "complete": member.complete}

    def _wake(self, member: _Member) -> None:
        """Set the clock to the newest one, unless the member was ahead of it."""
        member.clock = max([member.kept, *self._clocks()])

    def _rest(self, member: _Member) -> None:
        with self._change:
            if member.clock is not None:
                member.kept, member.clock = member.clock, None
            self._arrived.pop(member, None)
            self._finish_rounds()
            self._change.notify_all()

    def _push(self, member: _Member, message: dict[str, Any]) -> Value:
        with self._change:
            if member.clock is None:  # it was considered disconnected
                self._wake(member)
            code, group = message["code"], message["group"]
            part = self._parts[group]
            grad = None if code is None else self._codec.decode(np.ascontiguousarray(code), part.weights.numel())
            behind = part.updates - member.received[group]
            if self._mode == "sync" and behind > 0:
                self._dropped += 1  # the others did not wait for it
                return {"weights": self._newer(member, [group]), "dropped": True}
            self._pushes, self._stale = self._pushes + 1, self._stale + behind
            self._stalest = max(self._stalest, behind)
            if self._mode == "sync":
                self._wait_for_round(member, _Push(group, grad, message["rows"], message["lr"]))
                # Other groups may have been updated without this member, if it left out their gradients.
                return {"weights": self._newer(member, range(len(self._parts)))}
            if grad is not None:
                self._apply(group, grad, message["lr"])
            if group == 0:
                member.clock = (member.clock or 0) + 1
                self._wait_for_slower(member)
            return {"weights": self._newer(member, [group])}

    def _share(self, member: _Member, message: dict[str, Any]) -> Value:
        """Keep moments for the other members, each of which receives them once."""
        with self._change:
            for other in self._members - {member}:
                other.new_moments = merged(other.new_moments, np.array(message["moments"]))
            new_moments, member.new_moments = member.new_moments, None
            return {"moments": new_moments}

    def _wait_for_round(self, member: _Member, push: _Push) -> None:
        self._arrived[member] = push
        self._finish_rounds()
        until = time.monotonic() + _TIMEOUT_S
        while member in self._arrived and not self._closed:
            if not self._change.wait(until - time.monotonic()):
                self._finish_rounds(late=True)

    def _finish_rounds(self, *, late: bool = False) -> None:
        """Finish the rounds that have enough gradients of one group; `late`: all, without the members still missing."""
        active = {member for member in self._members if member.clock is not None}
        needed = max(1, min(len(active), self._num_workers - self._backup_workers))
        if late:
            self._timeouts += len(active - self._arrived.keys())
            for member in active - self._arrived.keys():
                member.clock = None  # not awaited until it pushes again
        while self._arrived:
            counts = Counter(push.group for push in self._arrived.values())
            if not late and len(self._arrived) < len(active) and max(counts.values()) < needed:
                return
            # In the order of groups, so that a member waits for at most one round of each other group.
            self._finish_round(min(counts, key=lambda group: (group - self._next_group) % len(self._parts)))

    def _finish_round(self, group: int) -> None:
        pushes = {member: push for member, push in self._arrived.items() if push.group == group}
        for member in pushes:
            member.clock = (member.clock or 0) + (group == 0)
            del self._arrived[member]
        self._next_group = group + 1
        self._change.notify_all()
        grads = [(push.grad, push.rows) for push in pushes.values() if push.grad is not None]
        lr = list(pushes.values())[-1].lr
        if len(grads) == 1:
            self._apply(group, grads[0][0], lr)
        elif grads:
            total = np.float32(sum(rows for _, rows in grads))
            whole = np.zeros(self._parts[group].weights.numel(), np.float32)
            for grad, rows in grads:
                whole += grad * np.float32(rows) if total else grad
            self._apply(group, whole / total if total else whole, lr)

    def _apply(self, group: int, grad: Array, lr: float) -> None:
        self._parts[group].apply(grad, lr)
        self.version += group == 0

    def _wait_for_slower(self, member: _Member) -> None:
        self._change.notify_all()
        if self._mode == "ssp":
            near = lambda: self._closed or self._ahead(member) <= self._staleness  # noqa: E731
            came = self._change.wait_for(near, _TIMEOUT_S)
            self._lead = max(self._lead, self._ahead(member))  # exceeds the bound if a member is given up on
            for other in () if came else self._members:
                if other.clock is not None and (member.clock or 0) - other.clock > self._staleness:
                    self._timeouts += 1
                    other.clock = None  # not awaited until it pushes again

    def _ahead(self, member: _Member) -> int:
        return (member.clock or 0) - min(self._clocks(), default=0)

    def _clocks(self) -> list[int]:
        return [member.clock for member in self._members if member.clock is not None]

    def _newer(self, member: _Member, groups: Iterable[int]) -> list[Value]:
        """Weights of each of these groups that the member does not have yet; None for the others."""
        weights: list[Value] = [None] * len(self._parts)
        for group in groups:
            part = self._parts[group]
            if member.received[group] != part.updates:
                weights[group], member.received[group] = self._coded(part), part.updates
        return weights

    def _coded(self, part: _GroupPart) -> Value:
        if part.coded is None or part.coded[0] != part.updates:
            weights = part.weights.detach().numpy()
            code = self._broadcast.encode(weights, self._rng).copy()
            read = self._broadcast.decode(code, len(weights))
            self._error = float(np.linalg.norm(read - weights) / max(1e-12, float(np.linalg.norm(weights))))
            part.coded = part.updates, code
        return part.coded[1]

    def state(self) -> dict[str, Any]:
        with self._change:
            return {"version": self.version, "parts": [part.state() for part in self._parts]}

    def load(self, state: dict[str, Any]) -> None:
        with self._change:
            self.version = state["version"]
            for part, kept in zip(self._parts, state["parts"], strict=True):
                part.load(kept)

    def metrics(self) -> dict[str, float]:
        """Staleness of gradients in updates, and how far a worker was ahead of the slowest."""
        with self._change:
            metrics = {
                "exchange/staleness": self._stale / max(1, self._pushes),
                "exchange/staleness_max": float(self._stalest),
                "exchange/dropped": float(self._dropped),
                "exchange/timeouts": float(self._timeouts),
            }
            if self._mode == "ssp":
                metrics["exchange/lead_max"] = float(self._lead)
            return metrics | ({"exchange/weights_error": self._error} if self._error else {})

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._listener.close()


def server_slices(group: slice, servers: int) -> list[slice]:
    """One parameter group's slice of the flat weights, split into one cache-aligned slice per server."""
    count = group.stop - group.start
    step = -(-count // (16 * servers)) * 16
    return [slice(group.start + min(count, k * step), group.start + min(count, (k + 1) * step)) for k in range(servers)]
