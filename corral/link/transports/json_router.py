"""The binding `zmq+json://`: simulators that drive the loop, each a REQ socket that sends JSON, at one ROUTER here.

A gateway: to the fleet each client is a simulator with one slot (see `json_client`), so everything behind it is the
same as for `zmq://`. docs/json_loop.md describes the clients' messages. An invalid message affects only its client.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import zmq

from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.link.address import Address
from corral.link.transports.base import Binding, Event
from corral.link.transports.json_client import MAX_TEXT, OVER, JsonPeer
from corral.link.transports.json_values import (
    ClientError,
    ClientMessage,
    max_message_bytes,
    read_client_message,
    spaces_of,
)
from corral.link.transports.zmq import MonitoredSocket, came_later

log = logging.getLogger("corral.link")

_MAX_CLIENTS = 1024
_MAX_BYTES = 16 << 20  # of a message, while the observation space is unknown
_HIGH_WATER = 2  # messages per client: a REQ socket has one in flight
_MAX_AT_ONCE = 128  # messages per poll, half of the fleet's limit on greetings
_GOODBYE_S = 1.0  # for clients that are in the middle of a step when the run ends

_encode = msgspec.json.Encoder().encode


class JsonBinding(Binding):
    """Listens for clients. `action` and `observation` are the spaces that the learner was given."""

    def __init__(
        self,
        *,
        listen: Address | None = None,
        connect: Sequence[Address] = (),
        action: Layout | None = None,
        observation: Layout | None = None,
        most: int = _MAX_BYTES,
    ):
        if listen is None:
            raise UserError(
                f"{', '.join(address.url for address in connect)}: simulators of zmq+json:// connect and the learner "
                "listens, at one free address of this machine; choose another port."
            )
        self._action, self._observation, self._most = action, observation, most
        self._first_bytes = most if observation is None else max_message_bytes(observation, most)
        self._peers: dict[Any, JsonPeer] = {}  # by identity of their sockets
        self._ids: dict[Any, JsonPeer] = {}
        self._by_fd: dict[Any, JsonPeer] = {}
        self._alive: set[int] = set()  # descriptors of connections
        self._events: list[Event] = []
        self._gone: list[JsonPeer] = []
        self._over = False
        self._context = zmq.Context()
        # Beyond 4 times `most` bytes libzmq closes the connection; below, the client gets an error.
        self._monitored = MonitoredSocket(self._context, zmq.ROUTER, listen, _HIGH_WATER, 4 * most)
        self._socket, self._poller = self._monitored.socket, zmq.Poller()
        self._monitored.watch(self._poller)
        try:
            self.urls = [self._monitored.listen()]
        except UserError:
            self.close()
            raise

    def poll(self, timeout_s: float) -> list[Event]:
        ready = dict(self._poller.poll(0 if self._events or self._gone else int(timeout_s * 1000)))
        if self._monitored.monitor in ready:
            self._watch()
        if self._socket in ready:
            self._read()
        while self._gone:  # now that their last messages are read
            self._gone.pop().leave("the connection is lost")
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Tell all clients that the run is over; those in the middle of a step have a second to receive it."""
        if self._over:
            return
        self._over = True
        for peer in list(self._peers.values()):
            if peer.waits:
                peer.answer(OVER)
                self._forget(peer)
        until = time.monotonic() + _GOODBYE_S
        while self._peers and (left := until - time.monotonic()) > 0:
            self.poll(left)
        self._monitored.close()
        self._context.term()

    def _watch(self) -> None:
        for event, descriptor in self._monitored.events():
            if event == zmq.EVENT_ACCEPTED:
                self._alive.add(descriptor)
                continue
            self._alive.discard(descriptor)
            if (peer := self._by_fd.get(descriptor)) is not None:
                self._drop_peer(peer)

    def _read(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return
            identity = frames[0].bytes
            peer = self._peers.get(identity)
            try:
                self._take(identity, peer, frames[1:])
            except ClientError as error:
                text = " ".join(str(error).split())[:MAX_TEXT]
                if peer is not None:
                    peer.fail(text)
                else:
                    log.warning("a JSON simulator was refused: %s.", text)
                    self._answer(identity, {"error": text})

    def _take(self, identity: bytes, peer: JsonPeer | None, frames: Sequence[Any]) -> None:
        if self._over:
            self._answer(identity, OVER)
            if peer is not None:
                self._forget(peer)
            return
        if len(frames) != 2 or len(frames[0]):
            raise ClientError(f"a message of {len(frames)} frames, expected an empty one and the JSON")
        body, most = frames[1].buffer, peer.json_bytes if peer is not None else self._first_bytes
        if len(body) > most:
            raise ClientError(f"a message of {len(body)} bytes, at most {most} are accepted")
        message = read_client_message(body)
        if peer is not None:
            peer.take(message)
        elif message.command == "terminate":
            self._answer(identity, {"action": None})
        else:
            self._welcome(identity, message, frames[1])

    def _welcome(self, identity: bytes, message: ClientMessage, frame: Any) -> None:
        if message.command != "reset":
            raise ClientError(f"a {message.command} from a client that is not connected; begin with a reset")
        where, descriptor = identity.hex(), None
        with contextlib.suppress(zmq.ZMQError, AttributeError):
            where, descriptor = str(frame.get("Peer-Address")), int(frame.get(zmq.SRCFD))
        if descriptor is not None and not self._is_there(identity, descriptor):
            return
        if message.env_id in self._ids:
            raise ClientError(f"the env_id {message.env_id!r} belongs to another client; give each its own")
        if len(self._peers) >= _MAX_CLIENTS:
            raise ClientError(f"{_MAX_CLIENTS} clients are connected already")
        peer = JsonPeer(
            identity, message.env_id, where, spaces_of(message, self._observation, self._action), self._most
        )
        peer.answer, peer.emit, peer.descriptor = partial(self._answer, identity), self._emit, descriptor
        peer.hello(message)
        for names, name in self._names(peer):
            names[name] = peer

    def _is_there(self, identity: bytes, descriptor: int) -> bool:
        """Whether a new client is still connected; the previous owner of its descriptor is then gone."""
        self._watch()
        rival = self._by_fd.get(descriptor)
        if descriptor not in self._alive or (rival is not None and not came_later(identity, rival.identity)):
            return False
        if rival is not None:
            self._drop_peer(rival)
        return True

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        if event.lost is not None and isinstance(event.wire, JsonPeer):
            self._forget(event.wire)

    def _answer(self, identity: bytes, value: Any) -> None:
        try:
            self._socket.send_multipart([identity, b"", _encode(value)], zmq.NOBLOCK)
        except zmq.ZMQError:
            if identity in self._peers:
                self._drop_peer(self._peers[identity])

    def _drop_peer(self, peer: JsonPeer) -> None:
        """Its connection is gone: it leaves once its earlier messages are read."""
        self._gone.append(peer)
        self._forget(peer, first=1)

    def _forget(self, peer: JsonPeer, first: int = 0) -> None:
        for names, name in self._names(peer)[first:]:
            if names.get(name) is peer:
                del names[name]

    def _names(self, peer: JsonPeer) -> list[tuple[dict[Any, JsonPeer], Any]]:
        return [(self._peers, peer.identity), (self._ids, peer.env_id), (self._by_fd, peer.descriptor)]
