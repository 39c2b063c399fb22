"""The binding `zmq+json://`: simulators that drive the loop, each a REQ socket that sends JSON to a `ZmqBinding`.

A gateway: to the fleet each client is a simulator with one slot (see `json_client`), so everything behind it is the
same as for `zmq://`. docs/json_loop.md describes the clients' messages. An invalid message affects only its client.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from corral.core.encoding import Buffer
from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.link.address import Address
from corral.link.transports.base import Binding, Event, Wire
from corral.link.transports.json_client import MAX_TEXT, OVER, JsonPeer
from corral.link.transports.json_values import (
    ClientError,
    ClientMessage,
    max_message_bytes,
    read_client_message,
    spaces_of,
)
from corral.link.transports.zmq import ZmqBinding, ZmqLimits

log = logging.getLogger("corral.link")

_MAX_CLIENTS = 1024
_MAX_BYTES = 16 << 20  # of a message, while the observation space is unknown
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
        self._peers: dict[Wire, JsonPeer] = {}
        self._ids: dict[str | int | float, JsonPeer] = {}
        self._events: list[Event] = []
        self._over = False
        # A REQ socket has one message in flight. Beyond 4 times `most` bytes its connection is closed; below, the
        # client gets an error. Messages per poll are half of the fleet's limit on greetings.
        self._sockets = ZmqBinding(listen=listen, limits=ZmqLimits(2, 4 * most, 4 * most, 128))
        self.urls = self._sockets.urls

    def poll(self, timeout_s: float) -> list[Event]:
        received = self._sockets.poll(0.0 if self._events else timeout_s)
        gone = {event.wire for event in received if event.lost is not None}
        for wire in gone & self._peers.keys():
            self._free_id(self._peers[wire])
        for event in received:
            if event.frames is not None:
                self._read(event.wire, event.frames, event.wire in gone)
            elif event.lost is not None and event.wire in self._peers:  # its last messages are read
                self._peers[event.wire].leave(event.lost)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Tell all clients that the run is over; those in the middle of a step have a second to receive it."""
        if self._over:
            return
        self._over = True
        for wire, peer in list(self._peers.items()):
            if peer.waits:
                _answer(wire, OVER)
                self._forget(wire)
        until = time.monotonic() + _GOODBYE_S
        while self._peers and (left := until - time.monotonic()) > 0:
            self.poll(left)
        self._sockets.close()

    def _read(self, wire: Wire, frames: Sequence[Buffer], gone: bool) -> None:
        peer = self._peers.get(wire)
        try:
            self._take(wire, peer, frames, gone)
        except ClientError as error:
            text = " ".join(str(error).split())[:MAX_TEXT]
            if peer is not None:
                peer.fail(text)
            else:
                log.warning("a JSON simulator was refused: %s.", text)
                _answer(wire, {"error": text})

    def _take(self, wire: Wire, peer: JsonPeer | None, frames: Sequence[Buffer], gone: bool) -> None:
        if self._over:
            _answer(wire, OVER)
            self._forget(wire)
            return
        if len(frames) != 2 or len(frames[0]):
            raise ClientError(f"a message of {len(frames)} frames, expected an empty one and the JSON")
        body, most = frames[1], peer.json_bytes if peer is not None else self._first_bytes
        if len(body) > most:
            raise ClientError(f"a message of {len(body)} bytes, at most {most} are accepted")
        message = read_client_message(body)
        if peer is not None:
            peer.take(message)
        elif message.command == "terminate":
            _answer(wire, {"action": None})
        elif message.command != "reset":
            raise ClientError(f"a {message.command} from a client that is not connected; begin with a reset")
        elif not gone:
            self._welcome(wire, message)

    def _welcome(self, wire: Wire, message: ClientMessage) -> None:
        if message.env_id in self._ids:
            raise ClientError(f"the env_id {message.env_id!r} belongs to another client; give each its own")
        if len(self._peers) >= _MAX_CLIENTS:
            raise ClientError(f"{_MAX_CLIENTS} clients are connected already")
        spaces = spaces_of(message, self._observation, self._action)
        peer = JsonPeer(message.env_id, wire.peer, spaces, self._most)
        peer.answer, peer.emit = partial(_answer, wire), partial(self._emit, wire)
        peer.hello(message)
        self._peers[wire] = self._ids[message.env_id] = peer

    def _emit(self, wire: Wire, event: Event) -> None:
        self._events.append(event)
        if event.lost is not None:
            self._forget(wire)

    def _forget(self, wire: Wire) -> None:
        if (peer := self._peers.pop(wire, None)) is not None:
            self._free_id(peer)

    def _free_id(self, peer: JsonPeer) -> None:
        if self._ids.get(peer.env_id) is peer:
            del self._ids[peer.env_id]


def _answer(wire: Wire, value: Any) -> None:
    wire.send([b"", _encode(value)])
