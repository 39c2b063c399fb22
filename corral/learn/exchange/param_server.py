"""The learner's side of a parameter server: sends gradients, receives weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corral.core.encoding import DecodeError, decode, encode, size_of
from corral.learn.exchange.base import ExchangeSetup, GradAction, GroupExchange, PeerLost
from corral.learn.exchange.compress import Compression, broadcast_codec, make_compression
from corral.learn.exchange.config import DataParallelConfig
from corral.learn.exchange.param_server_process import ENTER, PUSH, REST, SHARE, server_slices
from corral.learn.exchange.peers import connect
from corral.learn.weights import group_slices
from corral.runtimes.connection import Connection, ConnectionClosed

_TIMEOUT_S = 1200.0  # twice the server's timeout for other workers


class ParamServer(GroupExchange):
    """One learner's connections to the servers, each of which holds a slice of the weights.

    Updates need no agreement (`agree`), because servers wait for a worker only in the middle of its turn.
    """

    clips_first = True  # no server sees the whole gradient, and with async there is no mean
    rendezvous = "corral.topologies.rendezvous:ServerRendezvous"

    @classmethod
    def make(cls, setup: ExchangeSetup) -> ParamServer:
        return cls(setup.config, group_slices(setup.model, setup.groups), setup.seed)

    def __init__(self, config: DataParallelConfig, groups: Sequence[slice], seed: int = 0):
        self._config, self._groups, self._seed = config, groups, seed
        self._broadcast = broadcast_codec(config)
        self._servers: list[Connection] = []
        self._slices: list[list[slice]] = []  # of each group, one slice of the flat weights per server
        self._compressions: list[list[Compression]] = []
        self._weights = torch.zeros(0)
        self._updates = 0
        self.sent = 0.0

    def join(self, servers: list[tuple[str, int]], secret: bytes, timeout_s: float) -> None:
        self.leave()
        self._servers = [connect(host, port, secret, timeout_s) for host, port in servers]

    def begin(self, weights: Tensor, turn: int, num_workers: int) -> None:
        self._weights = weights
        if not self._slices:
            self._slices = [server_slices(group, len(self._servers)) for group in self._groups]
            numbers = itertools.count(self._seed)
            self._compressions = [
                [make_compression(self._config, s.stop - s.start, next(numbers)) for s in parts]
                for parts in self._slices
            ]
        answers = self._ask(ENTER, [{"num_workers": num_workers}] * len(self._servers))
        if len(answers) > 1 and not all(answer["complete"] for answer in answers):
            self.leave()  # servers that know of different workers would wait for each other's rounds
            raise PeerLost("a worker did not begin the turn in time")
        self._take(answers)

    def end(self) -> None:
        for server in self._servers:
            self._send(server, REST, None)

    def leave(self) -> None:
        for server in self._servers:
            server.close()
        self._servers = []

    def metrics(self) -> dict[str, float]:
        return {"exchange/bytes_per_update": self.sent / max(1, self._updates)}

    def grads(
        self, grad: Tensor, rows: int, lr: float, *, group: int = 0, stop: bool = False, last: bool = False
    ) -> GradAction:
        """Send the gradient and take the returned weights; a non-finite one is not sent, and the learner reports it."""
        if stop:
            return "stop"
        self._updates += 1
        own, start = grad.detach().cpu().numpy(), self._groups[group].start
        finite = math.isfinite(float(grad.norm()))  # otherwise it was too large to be clipped
        messages = [
            {"group": group, "code": compression.pack(own[s.start - start : s.stop - start]) if finite else None,
             "rows": rows, "lr": lr}
            for compression, s in zip(self._compressions[group], self._slices[group], strict=True)
        ]  # fmt: skip
        try:
            answers = self._ask(PUSH, messages)
        except PeerLost:
            self._put_back(group, messages)
            raise
        if any(answer.get("dropped") for answer in answers):
            self._put_back(group, messages)  # the server dropped it as too late
        self._take(answers)
        return "skip" if finite else "apply"

    def _put_back(self, group: int, messages: list[dict[str, Any]]) -> None:
        for compression, message in zip(self._compressions[group], messages, strict=True):
            if message["code"] is not None:
                compression.undo_pack(message["code"])

    def share(self, values: Tensor) -> list[Tensor]:
        """Send moments to the first server, which keeps them for the others."""
        self._send(self._servers[0], SHARE, {"moments": values.detach().cpu().numpy()})
        new_moments = self._receive(self._servers[0])["moments"]
        return [values] if new_moments is None else [values, torch.from_numpy(np.array(new_moments)).to(values.device)]

    def _take(self, answers: list[Any]) -> None:
        """Take the weights of the groups that have changed."""
        with torch.no_grad():
            for k, answer in enumerate(answers):
                for slices, code in zip(self._slices, answer["weights"], strict=True):
                    if code is not None:
                        s = slices[k]
                        values = self._broadcast.decode(np.array(code), s.stop - s.start)
                        self._weights[s].copy_(torch.from_numpy(values))

    def _ask(self, kind: int, messages: list[Any]) -> list[Any]:
        for server, message in zip(self._servers, messages, strict=True):
            self._send(server, kind, message)
        return [self._receive(server) for server in self._servers]

    def _send(self, server: Connection, kind: int, message: Any) -> None:
        try:
            parts = encode(message)
            server.send(kind, 0, parts)
            self.sent += size_of(parts)
        except ConnectionClosed as error:
            self.leave()
            raise PeerLost(f"the connection to a parameter server failed: {error}") from error

    def _receive(self, server: Connection) -> Any:
        try:
            frame = server.read(wait=True, timeout_s=_TIMEOUT_S)
            assert frame is not None
            self.sent += len(frame[2])
            return decode(frame[2])
        except (ConnectionClosed, DecodeError) as error:
            self.leave()
            raise PeerLost(f"the connection to a parameter server failed: {error}") from error
