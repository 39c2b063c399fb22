"""The binding `zmq://`: multipart messages, a ROUTER to listen, a DEALER for each address to connect to."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from corral.core.encoding import Buffer
from corral.core.errors import UserError
from corral.link.address import Address
from corral.link.protocol import GREETING_BYTES
from corral.link.transports import base as binding
from corral.link.transports.base import Binding, Event, Wire

_HEARTBEAT_MS, _DEAD_MS = 2_000, 10_000
_LINGER_MS = 500  # for a goodbye to be delivered
_LOST = "the connection is lost"
# Plain numbers: pyzmq's enumerations cost more than the calls they are for.
_NOW, _MORE, _EVENTS, _READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.EVENTS), int(zmq.POLLIN)


class ZmqLimits(NamedTuple):
    """What a binding takes from its peers."""

    high_water: int = 18  # messages: the window and two
    frame_bytes: int = 1 << 29  # libzmq needs a limit before the observation space is known
    message_bytes: int = GREETING_BYTES  # of a new peer
    at_once: int = 256  # messages per poll


class ZmqWire(Wire):
    """One peer: an identity of a ROUTER, or all of a DEALER."""

    def __init__(self, sock: Any, identity: bytes | None, peer: str):
        self._socket, self.identity, self.peer, self.initiated = sock, identity, peer, identity is None
        self.broken: str | None = None
        self._out: deque[list[Buffer]] = deque()
        self._unsent = 0  # bytes

    def send(self, frames: Sequence[Buffer]) -> None:
        if self.broken is None:
            parts = list(frames) if self.identity is None else [self.identity, *frames]
            if self._out or not self._try(parts):
                size = sum(map(len, parts))
                if self._unsent and self._unsent + size > binding.MAX_UNSENT_BYTES:
                    self.broken = binding.UNREAD
                    self._out.clear()
                    return
                self._unsent += size
                self._out.append([bytes(part) for part in parts])

    def flush(self) -> None:
        while self._out and self._try(self._out[0]):
            self._unsent -= sum(map(len, self._out.popleft()))

    @property
    def waits(self) -> bool:
        return bool(self._out)

    def _try(self, parts: list[Buffer]) -> bool:
        try:
            for part in parts[:-1]:
                self._socket.send(part, _MORE)
            self._socket.send(parts[-1], _NOW)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:  # EHOSTUNREACH: the peer of this identity is gone
            self.broken = self.broken or str(error)
        return True

    def close(self) -> None:
        self.broken = self.broken or "closed here"


class MonitoredSocket:
    """A socket, and its libzmq monitor, which reports connections that are made and lost."""

    def __init__(self, context: Any, kind: int, address: Address, limits: ZmqLimits):
        self.address, high_water = address, limits.high_water
        self.socket: Any = context.socket(kind)
        for option, value in (
            (zmq.SNDHWM, high_water), (zmq.RCVHWM, high_water), (zmq.LINGER, _LINGER_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, _DEAD_MS), (zmq.HEARTBEAT_TTL, _DEAD_MS),
            (zmq.RECONNECT_IVL, 100), (zmq.RECONNECT_IVL_MAX, 2_000), (zmq.IPV6, int(":" in address.host)),
            (zmq.MAXMSGSIZE, limits.frame_bytes),
        ):  # fmt: skip
            self.socket.setsockopt(option, value)
        if kind == zmq.ROUTER:
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.monitor: Any = self.socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        )

    def watch(self, poller: zmq.Poller) -> None:
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)

    def listen(self) -> str:
        """Listen at the address; returns its URL with the real port. UserError when that fails."""
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.bind_host
        try:
            self.socket.bind(f"tcp://{host}:{self.address.port or '*'}")
        except zmq.ZMQError as error:
            raise UserError(f"Cannot listen on {self.address.url} ({error}); choose another host or port.") from error
        endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return self.address.with_port(int(endpoint.rpartition(":")[2])).url

    def events(self) -> Iterator[tuple[int, int]]:
        """Connections since the last call: kind of event, and descriptor."""
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            yield event["event"], event["value"]

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()


_LIMITS = ZmqLimits()


class ZmqBinding(Binding):
    """Listens at one address, or connects to several; libzmq reconnects by itself, each time as a new wire here."""

    def __init__(self, *, listen: Address | None = None, connect: Sequence[Address] = (), limits: ZmqLimits = _LIMITS):
        self._limits = limits
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._peers: dict[bytes, ZmqWire] = {}  # of a ROUTER
        self._calls: dict[MonitoredSocket, ZmqWire | None] = {}  # of DEALERs
        self._router: MonitoredSocket | None = None
        self._by_fd: dict[int, ZmqWire | None] = {}  # connections of a ROUTER, and the peer that was heard over each
        self._ending: list[ZmqWire] = []
        self._events: list[Event] = []
        if listen is not None:
            self._router = self._open(zmq.ROUTER, listen)
            try:
                self.urls = [self._router.listen()]
            except UserError:
                self.close()
                raise
        else:
            for address in connect:
                self._connect(address)
            self.urls = [address.url for address in connect]

    def poll(self, timeout_s: float) -> list[Event]:
        events, self._events = self._events, []
        wires = [*self._peers.values(), *filter(None, self._calls.values())]
        for wire in wires:
            wire.flush()
        wait = 0.0 if events else 0.02 if any(wire.waits for wire in wires) else timeout_s
        ready = dict(self._poller.poll(round(wait * 1000)))
        for monitored in [] if not ready else [*self._calls, *([self._router] if self._router else [])]:
            self._read(monitored, events)
            if monitored.monitor in ready:
                self._watch(monitored, events)
                self._read(monitored, events)  # messages sent before a connection was lost come first
        while self._ending:
            wire = self._ending.pop()
            wire.broken = wire.broken or _LOST
        self._drop_broken(events)
        return events

    def close(self) -> None:
        for monitored in [*self._calls, *([self._router] if self._router else [])]:
            monitored.close()
        self._calls.clear()
        self._router = None
        self._context.term()

    def _open(self, kind: int, address: Address) -> MonitoredSocket:
        monitored = MonitoredSocket(self._context, kind, address, self._limits)
        monitored.watch(self._poller)
        return monitored

    def _connect(self, address: Address) -> None:
        monitored = self._open(zmq.DEALER, address)
        monitored.socket.connect(f"tcp://{address.url.partition('://')[2]}")
        self._calls[monitored] = None

    def _watch(self, monitored: MonitoredSocket, events: list[Event]) -> None:
        for event, descriptor in monitored.events():
            if event == zmq.EVENT_CONNECTED and monitored is not self._router:
                wire = self._calls[monitored] = ZmqWire(monitored.socket, None, monitored.address.url)
                events.append(Event(wire))
            elif event == zmq.EVENT_ACCEPTED:
                self._by_fd[descriptor] = None
            elif event == zmq.EVENT_DISCONNECTED:
                lost = self._by_fd.pop(descriptor, None) if monitored is self._router else self._calls[monitored]
                if lost is None:
                    continue
                if monitored is self._router:
                    self._ending.append(lost)
                    continue
                self._read(monitored, events)
                lost.broken = lost.broken or _LOST
                self._calls[monitored] = None  # now, because it may be connected again already
                events.append(Event(lost, lost=lost.broken))

    def _read(self, monitored: MonitoredSocket, events: list[Event]) -> None:
        sock = monitored.socket
        for _ in range(self._limits.at_once):
            try:
                if not sock.getsockopt(_EVENTS) & _READABLE:
                    return
                frames = [sock.recv(_NOW, copy=False)]
                while frames[-1].more:
                    frames.append(sock.recv(_NOW, copy=False))
            except zmq.ZMQError:
                return
            wire = self._calls.get(monitored) if monitored is not self._router else self._peer(frames, events)
            if wire is None or wire.broken is not None:
                continue
            parts = [frame.buffer for frame in (frames if wire.identity is None else frames[1:])]
            size = sum(map(len, parts))
            if size > wire.max_bytes:
                wire.broken = f"a message of {size} bytes, at most {wire.max_bytes} are accepted"
                continue
            events.append(Event(wire, parts))

    def _peer(self, frames: Sequence[Any], events: list[Event]) -> ZmqWire | None:
        identity = frames[0].bytes
        wire = self._peers.get(identity)
        if wire is None:
            assert self._router is not None
            wire = self._peers[identity] = ZmqWire(self._router.socket, identity, _peer_name(frames[-1], identity))
            wire.max_bytes = self._limits.message_bytes
            with contextlib.suppress(zmq.ZMQError, AttributeError):
                self._know(wire, frames[-1].get(zmq.SRCFD), events)
            events.append(Event(wire))
        return wire

    def _know(self, wire: ZmqWire, fd: int, events: list[Event]) -> None:
        """Note over which connection a peer was first heard; libzmq reports its loss by that descriptor.

        The system reuses descriptors at once: a peer whose connection was lost and a newer one may both have messages
        waiting under the same number. So all of libzmq's connection events are handled first.
        """
        assert self._router is not None
        self._watch(self._router, events)
        rival = self._by_fd.get(fd)
        if fd not in self._by_fd or (rival is not None and not _came_later(wire.identity, rival.identity)):
            self._ending.append(wire)  # it is gone already
            return
        self._by_fd[fd] = wire
        if rival is not None:
            self._ending.append(rival)

    def _drop_broken(self, events: list[Event]) -> None:
        for identity, wire in list(self._peers.items()):
            if wire.broken is not None:
                del self._peers[identity]
                events.append(Event(wire, lost=wire.broken))
        for monitored, call in list(self._calls.items()):
            if call is not None and call.broken is not None:
                events.append(Event(call, lost=call.broken))
                self._reconnect(monitored)

    def _reconnect(self, monitored: MonitoredSocket) -> None:
        self._poller.unregister(monitored.socket)
        self._poller.unregister(monitored.monitor)
        del self._calls[monitored]
        monitored.close()
        self._connect(monitored.address)


def _came_later(one: bytes | None, other: bytes | None) -> bool:
    """Whether a connection is newer, by the counter in libzmq's identities; other identities by when they are heard."""
    if not (one and other and len(one) == len(other) == 5 and one[0] == other[0] == 0):
        return True
    return (int.from_bytes(one, "big") - int.from_bytes(other, "big")) % (1 << 32) < 1 << 31


def _peer_name(frame: Any, identity: bytes) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except (zmq.ZMQError, AttributeError):
        return identity.hex()
