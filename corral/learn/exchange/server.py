"""A parameter server: gradients in, weights out.

`sync`: an update is the mean of all workers, and all wait for it; with `backup_workers` it does not wait for the last
few, whose gradients come too late and are dropped (Heess et al. 2017). `async`: every gradient is an update (Mnih et
al. 2016). `ssp`: the same, and a worker that is more than `staleness` updates ahead of the slowest waits
(Ho et al. 2013).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corral.core.encoding import DecodeError, Value, decode, encode
from corral.core.types import Array
from corral.learn.exchange.compress import Codec
from corral.learn.exchange.config import Mode
from corral.learn.exchange.peers import Listener
from corral.nets.obs_norm import merged
from corral.ops.optim import Optimizer
from corral.runtimes.connection import Connection, ConnectionClosed

ENTER, PUSH, SHARE, REST = range(4)
_PATIENCE_S = 600.0  # with somebody who neither pushes nor goes: a slow simulator, or an update as long
_SEND_S = 60.0
_CREW_S = 10.0  # for all of a crew to begin a turn
_QUIET_S = 900.0  # a member that says nothing for so long, acting or waiting for its next turn, is let go


@dataclass
class Rules:
    """When gradients are applied, and who waits for whom."""

    mode: Mode
    staleness: int = 0
    backup_workers: int = 0


class _Member:
    """A learner that is connected."""

    def __init__(self) -> None:
        self.clock: int | None = None  # updates of its own; None while it rests, and nobody is to wait for it
        self.kept = 0  # its clock when it began to rest
        self.unseen: Array | None = None  # moments of observations that others have made


class ParamServerProcess:
    """Serves one slice of the weights, with its own part of the optimizer's state."""

    def __init__(
        self, weights: Tensor, optimizer: Callable[[list[nn.Parameter]], Optimizer], rules: Rules, codec: Codec,
        broadcast: Codec, host: str, secret: bytes,
    ):  # fmt: skip
        self._weights = nn.Parameter(weights.detach().clone())
        self._weights.grad = torch.zeros_like(self._weights)
        self._optimizer, self._rules, self._codec, self._broadcast = optimizer([self._weights]), rules, codec, broadcast
        self._rng = np.random.default_rng(0)
        self._change = threading.Condition()
        self._members: set[_Member] = set()
        self._arrived: dict[_Member, tuple[Array | None, int]] = {}
        self._crew = 1  # who are to begin a turn together
        self._coming: set[_Member] = set()  # those that wait for the others to begin a turn
        self.version = 0
        """Updates so far."""
        self._closed = False
        self._told: tuple[int, dict[str, Value]] | None = None
        self._pushes = self._dropped = self._stale = self._stalest = self._lead = self._let_go = 0
        self._error = self._lr = 0.0
        self._listener = Listener(host, secret, self._serve, _SEND_S)
        self.port = self._listener.port

    # -- one member --------------------------------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        member = _Member()
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
        """It begins a turn with the newest weights, and so with the newest clock. With `sync` all begin together."""
        with self._change:
            self._coming.add(member)
            if self._rules.mode == "sync" and len(self._coming) < message["crew"]:
                self._change.wait_for(lambda: member not in self._coming or self._closed, _CREW_S)
            if member in self._coming:
                together = self._coming if self._rules.mode == "sync" else {member}
                for other in together:
                    self._wake(other)
                self._crew = message["crew"]
                self._coming -= set(together)
                self._change.notify_all()
            return self._newest()

    def _wake(self, member: _Member) -> None:
        """It has the newest weights from now on, and so the newest clock; that of one who was ahead stays."""
        member.clock = max([member.kept, *self._clocks()])

    def _rest(self, member: _Member) -> None:
        with self._change:
            if member.clock is not None:
                member.kept, member.clock = member.clock, None
            self._arrived.pop(member, None)
            self._finish_round()
            self._change.notify_all()

    def _push(self, member: _Member, message: dict[str, Any]) -> Value:
        with self._change:
            if member.clock is None:  # it was taken for gone
                self._wake(member)
            code, rows = message["code"], message["rows"]
            grad = None if code is None else self._codec.decode(np.ascontiguousarray(code), self._weights.numel())
            behind = self.version - message["version"]
            if self._rules.mode == "sync" and behind > 0:
                self._dropped += 1  # the others did not wait for it
                return {**self._newest(), "dropped": True}
            self._pushes, self._stale = self._pushes + 1, self._stale + behind
            self._stalest = max(self._stalest, behind)
            self._lr = message["lr"]
            if self._rules.mode == "sync":
                self._wait_for_round(member, grad, rows)
            else:
                if grad is not None:
                    self._apply(grad)
                member.clock = (member.clock or 0) + 1
                self._wait_for_slower(member)
            return self._newest()

    def _share(self, member: _Member, message: dict[str, Any]) -> Value:
        """Keep moments for the others, who each get them once."""
        with self._change:
            for other in self._members - {member}:
                other.unseen = merged(other.unseen, np.array(message["moments"]))
            unseen, member.unseen = member.unseen, None
            return {"moments": unseen}

    # -- updates -----------------------------------------------------------------------------------------------

    def _wait_for_round(self, member: _Member, grad: Array | None, rows: int) -> None:
        version = self.version
        self._arrived[member] = (grad, rows)
        self._finish_round()
        until = time.monotonic() + _PATIENCE_S
        while member in self._arrived and self.version == version and not self._closed:
            if not self._change.wait(until - time.monotonic()):
                self._finish_round(late=True)
                break

    def _finish_round(self, *, late: bool = False) -> None:
        """Update if everybody who is waited for has come."""
        active = {member for member in self._members if member.clock is not None}
        needed = max(1, min(len(active), self._crew - self._rules.backup_workers))
        if not self._arrived or (len(self._arrived) < needed and not late):
            return
        if late:
            self._let_go += len(active - self._arrived.keys())
            for member in active - self._arrived.keys():
                member.clock = None  # it is not waited for again until it comes
        parts = [(grad, rows) for grad, rows in self._arrived.values() if grad is not None]
        for member in self._arrived:
            member.clock = (member.clock or 0) + 1
        self._arrived.clear()
        self._change.notify_all()
        if len(parts) == 1:
            self._apply(parts[0][0])
        elif parts:
            total = np.float32(sum(rows for _, rows in parts))
            whole = np.zeros(self._weights.numel(), np.float32)
            for grad, rows in parts:
                whole += grad * np.float32(rows) if total else grad
            self._apply(whole / total if total else whole)

    def _apply(self, grad: Array) -> None:
        assert self._weights.grad is not None
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr
        self._weights.grad.copy_(torch.from_numpy(grad))
        self._optimizer.step()
        self.version += 1

    def _wait_for_slower(self, member: _Member) -> None:
        self._change.notify_all()
        if self._rules.mode == "ssp":
            near = lambda: self._closed or self._ahead(member) <= self._rules.staleness  # noqa: E731 - said once
            came = self._change.wait_for(near, _PATIENCE_S)
            self._lead = max(self._lead, self._ahead(member))  # above the bound, where somebody is let go
            for other in () if came else self._members:
                if other.clock is not None and (member.clock or 0) - other.clock > self._rules.staleness:
                    self._let_go += 1
                    other.clock = None  # it is not waited for again until it comes

    def _ahead(self, member: _Member) -> int:
        return (member.clock or 0) - min(self._clocks(), default=0)

    def _clocks(self) -> list[int]:
        return [member.clock for member in self._members if member.clock is not None]

    def _newest(self) -> dict[str, Value]:
        """The weights, coded once for everybody."""
        if self._told is None or self._told[0] != self.version:
            weights = self._weights.detach().numpy()
            code = self._broadcast.encode(weights, self._rng).copy()
            read = self._broadcast.decode(code, len(weights))
            self._error = float(np.linalg.norm(read - weights) / max(1e-12, float(np.linalg.norm(weights))))
            self._told = self.version, {"version": self.version, "weights": code}
        return self._told[1]

    # -- what the run asks -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What another server would go on from."""
        with self._change:
            optimizer = self._optimizer.state_dict()["state"].get(0, {})
            kept = {k: v.detach().numpy().copy() if isinstance(v, Tensor) else v for k, v in optimizer.items()}
            return {"version": self.version, "weights": self._weights.detach().numpy().copy(), "optimizer": kept}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        with self._change, torch.no_grad():
            self.version, self._told = state["version"], None
            self._weights.copy_(torch.from_numpy(np.array(state["weights"])))
            kept = {k: torch.from_numpy(np.array(v)) if isinstance(v, np.ndarray) else v
                    for k, v in state["optimizer"].items()}  # fmt: skip
            whole = self._optimizer.state_dict()
            whole["state"] = {0: kept} if kept else {}
            self._optimizer.load_state_dict(whole)

    def metrics(self) -> dict[str, float]:
        """How old gradients were, in updates since their weights, and how far anybody was ahead of the slowest."""
        with self._change:
            told = {
                "exchange/staleness": self._stale / max(1, self._pushes),
                "exchange/staleness_max": float(self._stalest),
                "exchange/dropped": float(self._dropped),
                "exchange/let_go": float(self._let_go),
            }
            if self._rules.mode == "ssp":
                told["exchange/lead_max"] = float(self._lead)
            return told | ({"exchange/weights_error": self._error} if self._error else {})

    def close(self) -> None:
        """Let everybody go."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._listener.close()


def slices(count: int, parts: int) -> Sequence[slice]:
    """A vector of `count` numbers cut into slices, aligned to cache lines."""
    step = -(-count // (16 * parts)) * 16
    return [slice(min(count, k * step), min(count, (k + 1) * step)) for k in range(parts)]
