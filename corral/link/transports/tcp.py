"""The binding `tcp://`: frames with their lengths, over plain sockets."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from corral.core.encoding import Buffer
from corral.core.errors import UserError
from corral.core.machine import Backoff
from corral.core.portable import READABLE, WRITABLE, Poll, new_epoll, yield_core
from corral.link.address import Address
from corral.link.transports import base as binding
from corral.link.transports.base import Binding, Event, Wire
from corral.link.transports.framing import BadFrames, FrameReader, pack

_SPIN_S = 100e-6  # maximum per wait
_SMOOTHING = 0.2


class SpinWait:
    """Waits with `poll(seconds)`; busy-waits (yields the core) if recent waits were short: waking costs 30 us."""

    def __init__(self, poll: Callable[[float], list[Any]]):
        self._poll = poll
        self._usual_s = 0.0

    def wait(self, timeout_s: float) -> list[Any]:
        poll = self._poll
        ready = poll(0.0)
        if ready or not timeout_s:
            return ready
        start = time.perf_counter()
        if self._usual_s < _SPIN_S:
            until = start + min(timeout_s, _SPIN_S)
            while not ready and time.perf_counter() < until:
                yield_core()
                ready = poll(0.0)
        if not ready:
            ready = poll(timeout_s)
        self._usual_s += _SMOOTHING * (time.perf_counter() - start - self._usual_s)
        return ready


_MAX_PARTS = 64
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_CONNECT_S = 2.0
_SHUT_S = 0.25  # pause in accepting connections when no descriptors are left
_MAX_AT_ONCE = 64  # messages of one peer before the others get their turn


class TcpWire(Wire):
    """A TCP connection."""

    def __init__(self, sock: socket.socket, peer: str, initiated: bool):
        sock.setblocking(False)
        tune(sock)
        self.socket, self.peer, self.initiated = sock, peer, initiated
        self.reader = FrameReader(self.max_bytes)
        self.broken: str | None = None
        self._out: deque[memoryview] = deque()
        self._unsent = 0  # bytes
        self._writable: Poll | None = None

    def watch(self, poller: Poll) -> None:
        self._writable = poller
        poller.register(self.socket, READABLE)

    def send(self, frames: Sequence[Buffer]) -> None:
        if self.broken is not None:
            return
        parts = pack(frames)
        if self._out:
            self._keep(parts, 0)
            return
        try:
            if len(parts) == 1:
                sent = self.socket.send(parts[0])
                if sent == len(parts[0]):
                    return
            else:
                gather = getattr(self.socket, "sendmsg", None)  # not on Windows
                sent = gather(parts[:_MAX_PARTS]) if gather else self.socket.send(b"".join(parts))
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.broken = error.strerror or str(error)
            return
        if sent < sum(map(len, parts)):
            self._keep(parts, sent)
            if self._writable is not None:
                self._writable.modify(self.socket, READABLE | WRITABLE)

    def _keep(self, parts: Sequence[Buffer], sent: int) -> None:
        size = sum(map(len, parts)) - sent
        if self._unsent and self._unsent + size > binding.MAX_UNSENT_BYTES:
            self.broken = binding.UNREAD
            self._out.clear()
            return
        self._unsent += size
        for part in parts:
            if sent >= len(part):
                sent -= len(part)
                continue
            self._out.append(memoryview(bytes(memoryview(part)[sent:])))  # its owner may change it meanwhile
            sent = 0

    def flush(self) -> None:
        try:
            while self._out:
                sent = self.socket.send(self._out[0])
                self._unsent -= sent
                if sent < len(self._out[0]):
                    self._out[0] = self._out[0][sent:]
                else:
                    self._out.popleft()
            if self._writable is not None:
                self._writable.modify(self.socket, READABLE)
        except BlockingIOError:
            pass
        except OSError as error:
            self.broken = error.strerror or str(error)

    def read(self) -> None:
        self.reader.max_bytes = self.max_bytes
        try:
            size = self.socket.recv_into(self.reader.room())
        except BlockingIOError:
            return
        except OSError as error:
            self.broken = error.strerror or str(error)
            return
        if not size:
            self.broken = "the other side closed the connection"
        self.reader.took(size)

    def close(self) -> None:
        self.broken = self.broken or "closed here"
        if self._writable is not None:
            with contextlib.suppress(OSError, ValueError):
                self._writable.unregister(self.socket)  # epoll forgets closed sockets, `select` does not
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()


class TcpBinding(Binding):
    """Listens at one address, or connects to several and reconnects when a connection is lost."""

    def __init__(self, *, listen: Address | None = None, connect: Sequence[Address] = ()):
        self._poller = new_epoll()
        self._spin = SpinWait(self._poller.poll)
        self._wires: dict[int, TcpWire] = {}
        self._listener: socket.socket | None = None
        self._targets = {address: _TcpTarget() for address in connect}
        self._more: deque[TcpWire] = deque()
        self._shut_until: float | None = None
        if listen is not None:
            self._listener = open_listener(listen)
            self._listener.setblocking(False)
            self._poller.register(self._listener, READABLE)
            self.urls = [listen.with_port(self._listener.getsockname()[1]).url]
        else:
            self.urls = [address.url for address in connect]

    def poll(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        if self._targets:
            timeout_s = min(timeout_s, self._connect_due(events))
        if self._shut_until is not None:
            timeout_s = min(timeout_s, self._open_again())
        ready: list[tuple[int, int]] = self._spin.wait(0.0 if events or self._more else timeout_s)
        again: Sequence[TcpWire] = ()
        if self._more:
            again, self._more = self._more, deque()
        for fd, mask in ready:
            wire = self._wires.get(fd)
            if wire is None:
                self._accept(events)
                continue
            if mask & WRITABLE:
                wire.flush()
            if mask & ~WRITABLE:
                wire.read()
                self._take(wire, events)
        for wire in again:
            self._take(wire, events)
        for wire in self._wires.values():
            if wire.broken is not None:
                self._drop_broken(events)
                break
        return events

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._poller.close()

    def _take(self, wire: TcpWire, events: list[Event]) -> None:
        try:
            for _ in range(_MAX_AT_ONCE):
                frames = wire.reader.next()
                if frames is None:
                    return
                events.append(Event(wire, frames))
                if wire.reader.empty:
                    return
            if wire not in self._more:
                self._more.append(wire)
        except BadFrames as error:
            wire.broken = wire.broken or str(error)

    def _drop_broken(self, events: list[Event]) -> None:
        for fd, wire in list(self._wires.items()):
            if wire.broken is not None:
                del self._wires[fd]
                with contextlib.suppress(OSError, ValueError):
                    self._poller.unregister(fd)
                wire.close()
                with contextlib.suppress(ValueError):
                    self._more.remove(wire)
                for target in self._targets.values():
                    if target.wire is wire:
                        target.lost()
                events.append(Event(wire, lost=wire.broken))

    def _accept(self, events: list[Event]) -> None:
        assert self._listener is not None
        try:
            sock, where = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # no descriptors left: a waiting peer would wake us again and again
            self._poller.unregister(self._listener)
            self._shut_until = time.monotonic() + _SHUT_S
            return
        with contextlib.suppress(OSError):
            self._add(TcpWire(sock, f"{where[0]}:{where[1]}", initiated=False), events)

    def _open_again(self) -> float:
        """Accept connections again when it is time; returns the seconds to wait at most."""
        assert self._listener is not None
        assert self._shut_until is not None
        if time.monotonic() >= self._shut_until:
            self._shut_until = None
            self._poller.register(self._listener, READABLE)
        return _SHUT_S

    def _add(self, wire: TcpWire, events: list[Event]) -> None:
        self._wires[wire.socket.fileno()] = wire
        wire.watch(self._poller)
        events.append(Event(wire))

    def _connect_due(self, events: list[Event]) -> float:
        """Connect where that is due; returns the seconds until the next attempt."""
        wait = 60.0
        for address, target in self._targets.items():
            if target.wire is not None:
                continue
            left = target.due - time.monotonic()
            if left <= 0:
                try:
                    sock = socket.create_connection((address.host, address.port), _CONNECT_S)
                except OSError:
                    left = target.failed()
                else:
                    target.wire = TcpWire(sock, address.url, initiated=True)
                    self._add(target.wire, events)
                    continue
            wait = min(wait, left)
        return wait


class _TcpTarget:
    def __init__(self) -> None:
        self.wire: TcpWire | None = None
        self.due, self._backoff = 0.0, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, jitter=0.3)

    def failed(self) -> float:
        """Note a failed attempt; returns the seconds until the next one."""
        pause = self._backoff.next()
        self.due = time.monotonic() + pause
        return pause

    def lost(self) -> None:
        self.wire = None
        self._backoff.reset()
        self.failed()


def open_listener(address: Address) -> socket.socket:
    """A socket that listens there; UserError when that fails."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            address.bind_host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            # On Windows SO_REUSEADDR would let two programs listen at one port.
            listener.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR), 1)
            listener.bind(where)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise UserError(f"Cannot listen on {address.url} ({error.strerror}); choose another host or port.") from error
    return listener


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and notice within about 10 s when the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
