"""Gossip: each learner learns by itself and mixes its weights with those of a few others; there is no server.

Stochastic gradient push (Assran et al. 2019): learner `i` has `x_i` and a weight `w_i`, learns with `z_i = x_i / w_i`,
and after each step `x_i <- x_i + dz` sends equal shares of `(x_i, w_i)` to its receivers in the graph, keeps one share,
and adds the shares received. For any graph and any delays the sums over all learners are preserved, so `z` converges to
the mean.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from corral.core.encoding import DecodeError, decode, encode, size_of
from corral.core.types import Array
from corral.learn.exchange.base import ExchangeSetup, GroupExchange, PeerLost
from corral.learn.exchange.compress import broadcast_codec
from corral.learn.exchange.config import DataParallelConfig
from corral.learn.exchange.peers import Listener, connect
from corral.nets.obs_norm import merged
from corral.runtimes.connection import Connection, ConnectionClosed

Graph = Literal["ring", "exponential", "complete"]


def receivers(graph: Graph, rank: int, size: int, number: int) -> list[int]:
    """Learners that `rank` sends to in round `number`.

    ring: the next one. exponential: the one 1, 2, 4, ... places ahead, in turn, so that after log2(size) rounds all are
    mixed (exactly if `size` is a power of two). complete: all others.
    """
    if size == 1:
        return []
    if graph == "complete":
        return [other for other in range(size) if other != rank]
    hop = 1 << number % (size - 1).bit_length() if graph == "exponential" else 1
    return [(rank + hop) % size]


def senders(graph: Graph, rank: int, size: int, number: int) -> list[int]:
    """Learners that send to `rank` in round `number`."""
    return [other for other in range(size) if other != rank and rank in receivers(graph, other, size, number)]


_BEGIN, _SHARE, _END, _MOMENTS = range(4)
_TIMEOUT_S = 600.0  # for a silent peer that is still connected: a slow simulator, or a long update
_SEND_S = 60.0
_MIN_WEIGHT = 0.5  # push-sum weight below which a learner sends nothing: parameters are divided by it


class Gossip(GroupExchange):
    """One learner's side. It applies its own gradients, and waits for others only in the middle of a turn.

    `sync`: a round waits for all shares sent in it. `ssp`: for shares sent `staleness` rounds earlier. `async`: does
    not wait. A disconnected learner is skipped by its senders and receivers.
    """

    rendezvous = "corral.topologies.rendezvous:GossipRendezvous"

    @classmethod
    def make(cls, setup: ExchangeSetup) -> Gossip:
        return cls(setup.config, setup.host, setup.secret, setup.seed)

    def __init__(self, config: DataParallelConfig, host: str, secret: bytes, seed: int = 0):
        self._graph: Graph = config.gossip_graph
        self._mode, self._staleness = config.rule
        self._codec, self._secret = broadcast_codec(config), secret
        self._rng = np.random.default_rng(seed)
        self._rank, self._peers, self._generation = 0, list[tuple[str, int]](), -1
        self._outgoing: dict[int, Connection] = {}
        self._x = self._z = torch.zeros(0)
        self._weight = 1.0
        self._turn, self._number = 0, 0
        self._change = threading.Condition()
        self._inbox: dict[tuple[int, int, int], tuple[Array, float]] = {}  # (turn, round, sender) -> share
        self._last_share: dict[int, tuple[int, int]] = {}  # sender -> turn and round of its last share
        self._finished_turn: dict[int, int] = {}  # sender -> its last turn
        self._gone: set[int] = set()
        self._new_moments: Array | None = None
        self._updates = 0
        self.sent = 0.0
        self._share_lost = False  # a share was sent to a disconnected peer
        self._distance = self._error = 0.0
        self._listener = Listener(host, secret, self._serve, _SEND_S)
        self.port = self._listener.port

    def join(self, peers: list[tuple[str, int]], rank: int, generation: int) -> None:
        """Set the peers, all with a weight of 1; messages in flight from before are ignored."""
        self._hang_up()
        with self._change:
            self._peers = [tuple(peer) for peer in peers]  # type: ignore[misc]
            self._rank, self._generation = rank, generation
            self._inbox.clear()
            self._finished_turn.clear()
            self._last_share.clear()
            self._gone.clear()
        self._x, self._weight, self._number = torch.zeros(0), 1.0, 0
        self._share_lost = False

    def begin(self, weights: Tensor, turn: int, num_workers: int) -> None:
        """With `sync` all restart the round count; otherwise a returning learner continues at the others' round."""
        if self._mode == "sync":
            self._turn, self._number = turn, 0
        else:
            with self._change:
                self._number = max([self._number, *(number + 1 for _, number in self._last_share.values())])
        # This also connects to all peers: only a connected peer is noticed at once when it disconnects.
        self._broadcast(_BEGIN, {"turn": self._turn, "round": self._number})
        if self._x.numel() != weights.numel():
            self._x, self._weight = weights.detach().clone(), 1.0
            self._z = weights.detach().clone()

    def end(self) -> None:
        self._broadcast(_END, {"turn": self._turn})

    def leave(self) -> None:
        self._hang_up()
        self._peers = []

    def close(self) -> None:
        self.leave()
        self._listener.close()

    def _hang_up(self) -> None:
        for connection in self._outgoing.values():
            connection.close()
        self._outgoing.clear()

    def metrics(self) -> dict[str, float]:
        metrics = {
            "exchange/bytes_per_update": self.sent / max(1, self._updates),
            "exchange/push_weight": self._weight,
            "exchange/neighbour_distance": self._distance,
        }
        return metrics | ({"exchange/weights_error": self._error} if self._error else {})

    def params(self, weights: Tensor) -> None:
        if len(self._peers) < 2:
            return
        self._updates += 1
        number, self._number = self._number, self._number + 1
        if self._share_lost:
            self._start_over()
        self._x += weights - self._z
        self._send(number)
        for array, weight in self._receive(number):
            x = torch.from_numpy(array).to(self._x.device)
            self._distance = float((x / weight - weights).norm() / weights.norm().clamp(min=1e-12))
            self._x += x
            self._weight += weight
        torch.div(self._x, self._weight, out=self._z)
        weights.copy_(self._z)

    def _start_over(self) -> None:
        """Reset the weight to 1: shares lost with a disconnected peer would make steps larger."""
        with self._change:
            self._inbox = {key: share for key, share in self._inbox.items() if key[2] not in self._gone}
            self._share_lost = False
        self._x.copy_(self._z)
        self._weight = 1.0

    def _send(self, number: int) -> None:
        size = len(self._peers)
        out = [peer for peer in receivers(self._graph, self._rank, size, number) if peer not in self._gone]
        if not out:
            return
        if self._weight < _MIN_WEIGHT:
            for peer in out:  # so that it does not wait
                self._post(peer, _SHARE, {"turn": self._turn, "round": number, "w": 0.0, "x": None})
            return
        part = self._weight / (1 + len(out))
        own = self._x.detach().cpu().numpy() / np.float32(1 + len(out))
        code = self._codec.encode(own, self._rng)
        sent = self._codec.decode(code, len(own))
        self._error = float(np.linalg.norm(sent - own) / max(1e-12, float(np.linalg.norm(own))))
        given = torch.from_numpy(sent.copy()).to(self._x.device)
        for peer in out:
            if self._post(peer, _SHARE, {"turn": self._turn, "round": number, "w": part, "x": code, "n": len(own)}):
                self._x -= given  # the rounding error stays here
                self._weight -= part

    def _receive(self, number: int) -> list[tuple[Array, float]]:
        """Shares to add now, in an order that does not depend on their arrival."""
        with self._change:
            if self._mode != "async" and number >= self._staleness:
                awaited = senders(self._graph, self._rank, len(self._peers), number - self._staleness)
                until = time.monotonic() + _TIMEOUT_S
                for peer in awaited:
                    while not self._settled(peer, number - self._staleness):
                        if not self._change.wait(until - time.monotonic()):
                            self._leave_out(peer)
            latest = (self._turn, number)
            chosen = sorted(key for key in self._inbox if self._mode == "async" or key[:2] <= latest)
            return [self._inbox.pop(key) for key in chosen]

    def _settled(self, peer: int, number: int) -> bool:
        """Whether a peer's share of a round has arrived, or never will."""
        ended = self._finished_turn.get(peer, -1) >= self._turn
        return ended or peer in self._gone or self._last_share.get(peer, (-1, -1)) >= (self._turn, number)

    def share(self, values: Tensor) -> list[Tensor]:
        """Send moments to all peers directly: they are small, and each must count exactly once."""
        self._broadcast(_MOMENTS, {"moments": values.detach().cpu().numpy()})
        with self._change:
            new_moments, self._new_moments = self._new_moments, None
        return [values] if new_moments is None else [values, torch.from_numpy(new_moments).to(values.device)]

    def _broadcast(self, kind: int, message: dict[str, Any]) -> None:
        for peer in range(len(self._peers)):
            if peer != self._rank:
                self._post(peer, kind, message)

    def _post(self, peer: int, kind: int, message: dict[str, Any]) -> bool:
        if peer in self._gone:
            return False
        try:
            if peer not in self._outgoing:
                self._outgoing[peer] = connect(*self._peers[peer], self._secret, _SEND_S)
            parts = encode(message | {"from": self._rank, "generation": self._generation})
            self._outgoing[peer].send(kind, 0, parts)
            self.sent += size_of(parts)
        except (ConnectionClosed, PeerLost):
            self._drop_peer(peer)
            return False
        return True

    def _drop_peer(self, peer: int) -> None:
        connection = self._outgoing.pop(peer, None)
        if connection is not None:
            connection.close()
        self._leave_out(peer)

    def _leave_out(self, peer: int) -> None:
        with self._change:
            self._gone.add(peer)
            self._share_lost = True
            self._change.notify_all()

    def _serve(self, connection: Connection) -> None:
        peer, generation = -1, -1
        with contextlib.suppress(ConnectionClosed, DecodeError, KeyError, TypeError, ValueError):
            while frame := connection.read(wait=True):
                message = decode(frame[2])
                with self._change:
                    if message["generation"] == self._generation:
                        peer, generation = int(message["from"]), self._generation
                        self._take(frame[0], peer, message)
                        self._change.notify_all()
        with self._change:
            if generation == self._generation:  # otherwise it disconnected only to join again
                self._leave_out(peer)

    def _take(self, kind: int, peer: int, message: dict[str, Any]) -> None:
        self._gone.discard(peer)  # it was only slow
        if kind == _MOMENTS:
            self._new_moments = merged(self._new_moments, np.array(message["moments"]))
            return
        if kind == _END:
            self._finished_turn[peer] = message["turn"]
            return
        at = message["turn"], message["round"]
        if kind == _BEGIN:
            self._finished_turn[peer] = at[0] - 1
            self._last_share[peer] = (at[0], at[1] - 1)  # earlier rounds will never come
            return
        self._last_share[peer] = at
        if not message["w"]:
            return
        x = self._codec.decode(np.ascontiguousarray(message["x"]), message["n"])  # may arrive before our turn begins
        key = (*(at if self._mode != "async" else (0, -1)), peer)
        if key in self._inbox:  # with async, shares may arrive before earlier ones were used: sum them
            before = self._inbox[key]
            self._inbox[key] = (before[0] + x, before[1] + message["w"])
        else:
            self._inbox[key] = (x.copy(), message["w"])
