"""The binding `grpc://`: the bytes of `tcp://`, each message one of the stream `/corral.Link/Attach`.

gRPC's own threads read and write. Received messages reach `poll` through one queue with room for a few messages per
peer; HTTP/2 flow control slows down a peer that sends more. Outgoing messages wait in a queue per wire; a peer that
lets it fill up is disconnected.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

from corral.core.encoding import Buffer
from corral.core.errors import UserError
from corral.core.machine import Backoff
from corral.link.address import Address
from corral.link.transports import base as binding
from corral.link.transports.base import Binding, Event, Wire
from corral.link.transports.framing import BadFrames, pack, unpack

MAX_BYTES = 1 << 30  # of a message
_PING_MS, _PONG_MS = 10_000, 20_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
OPTIONS = (
    ("grpc.max_send_message_length", MAX_BYTES),
    ("grpc.max_receive_message_length", MAX_BYTES),
    # A machine that is switched off or unplugged sends nothing: ping it.
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PONG_MS),
    ("grpc.http2.ping_timeout_ms", _PONG_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS // 2),  # what the peer may do
    ("grpc.initial_reconnect_backoff_ms", int(1000 * _FIRST_PAUSE_S)),
    ("grpc.min_reconnect_backoff_ms", int(1000 * _LONGEST_PAUSE_S)),  # in effect the connect timeout
    ("grpc.max_reconnect_backoff_ms", int(1000 * _LONGEST_PAUSE_S)),
    ("grpc.so_reuseport", 0),  # otherwise two processes could share a port, and each would get half of the calls
    ("grpc.enable_http_proxy", 0),  # peers are nearby; proxies are for the internet
)
"""Options of channels and servers."""
SERVICE, METHOD = "corral.Link", "Attach"
ANSWER = (("corral-link", "1"),)  # initial metadata by which a client knows that it was accepted, before any message

_MAX_CALLS = 1280  # sessions and greetings of the learner
_MAX_UNREAD, _MAX_UNREAD_BYTES = 18, 1 << 26  # per wire, but always at least one message
_MAX_UNSENT = 1024
_LEAVE_S = 1.0  # for the peer to take what was sent before the end
_CLOSE_S = 0.5


def import_grpc() -> Any:
    """The grpc package; UserError when it is not installed."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # Corral reports errors itself
    try:
        return importlib.import_module("grpc")
    except ModuleNotFoundError as error:
        raise UserError("gRPC is not installed: pip install 'corral-rl[grpc]'.") from error


class Threads(futures.Executor):
    """One thread per call, which gRPC bounds; Python's own pool would wait for them forever at exit."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


class _Inbox:
    """Events on their way from gRPC's threads to `poll`."""

    def __init__(self) -> None:
        self._events: deque[tuple[Event, int]] = deque()
        lock = threading.Lock()
        self._came, self._room = threading.Condition(lock), threading.Condition(lock)
        self._closed = False

    def put(self, event: Event, size: int = 0) -> bool:
        """Queue an event, a message only once there is room; False when the inbox or wire is closed."""
        wire = event.wire
        assert isinstance(wire, GrpcWire)
        with self._room:
            while (
                size and wire.unread and not self._closed and wire.broken is None
                and (wire.unread >= _MAX_UNREAD or wire.unread_bytes + size > _MAX_UNREAD_BYTES)
            ):  # fmt: skip
                self._room.wait()
            if self._closed or wire.broken is not None:
                return False
            if size:
                wire.unread += 1
                wire.unread_bytes += size
            self._events.append((event, size))
            self._came.notify()
        return True

    def close_wire(self, wire: GrpcWire, reason: str, here: bool) -> bool:
        """Mark a wire as lost, deliberately (`here`) or not; False when it already was."""
        with self._room:
            if here:
                wire.closed = True  # its unread messages are dropped
            if wire.broken is not None:
                return False
            wire.broken = reason
            self._events.append((Event(wire, lost=reason), 0))
            self._came.notify()
            self._room.notify_all()
        return True

    def take(self, timeout_s: float) -> list[Event]:
        with self._came:
            if not self._events and timeout_s > 0:
                self._came.wait(timeout_s)
            events = []
            for event, size in self._events:
                wire = event.wire
                assert isinstance(wire, GrpcWire)
                if size:
                    wire.unread -= 1
                    wire.unread_bytes -= size
                if event.frames is None or not wire.closed:
                    events.append(event)
            self._events.clear()
            self._room.notify_all()
        return events

    def close(self) -> None:
        with self._room:
            self._closed = True
            self._room.notify_all()


class GrpcWire(Wire):
    """One gRPC stream."""

    def __init__(self, inbox: _Inbox, peer: str, initiated: bool):
        self.peer, self.initiated = peer, initiated
        self.broken: str | None = None
        self.closed = False
        self.met = False  # whether `poll` has reported the peer
        self.unread = self.unread_bytes = 0  # guarded by the inbox
        self.hang_up: Callable[[], Any] = lambda: None
        self.over = threading.Event()
        self._inbox = inbox
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._put = self._taken = 0  # bytes; each counter is written by one thread only

    def send(self, frames: Sequence[Buffer]) -> None:
        if self.broken is not None:
            return
        data = b"".join(pack(frames))
        waiting = self._put - self._taken
        if self._outbox.qsize() >= _MAX_UNSENT or (waiting and waiting + len(data) > binding.MAX_UNSENT_BYTES):
            self.end(binding.UNREAD, here=True)
            self.hang_up()
            return
        self._put += len(data)
        self._outbox.put(data)

    def close(self) -> None:
        """End the call after what was sent; a peer that does not take it within a second is cut off."""
        self.end("closed here", here=True)

    def end(self, reason: str, here: bool = False) -> None:
        if self._inbox.close_wire(self, reason, here):
            self.stop_writing()

    def stop_writing(self) -> None:
        self._outbox.put(None)

    def outgoing(self) -> Iterator[bytes]:
        while (data := self._outbox.get()) is not None:
            self._taken += len(data)
            yield data

    def read(self, messages: Iterable[bytes]) -> None:
        """Runs in its own thread: queue incoming messages until the call ends."""
        reason = "the other side closed the connection"
        try:
            for data in messages:
                if not self._inbox.put(Event(self, unpack(data, self.max_bytes)), len(data)):
                    break
        except BadFrames as error:
            reason = str(error)
        except Exception as error:  # how gRPC reports the end of a call
            details = getattr(error, "details", lambda: None)()
            reason = f"the connection is lost: {details}" if details else "the connection is lost"
        self.end(reason)


class GrpcBinding(Binding):
    """Listens at one address, or connects to several and reconnects when a connection is lost."""

    def __init__(self, *, listen: Address | None = None, connect: Sequence[Address] = ()):
        self._grpc = import_grpc()
        self._inbox = _Inbox()
        self._owner, self._closed = os.getpid(), False
        self._leaving: deque[tuple[float, GrpcWire]] = deque()
        self._server: Any = None
        self._targets: list[_GrpcTarget] = []
        if listen is not None:
            self.urls = [listen.with_port(self._listen(listen)).url]
        else:
            self._targets = [_GrpcTarget(self._grpc, address, self._inbox) for address in connect]
            self.urls = [address.url for address in connect]

    def poll(self, timeout_s: float) -> list[Event]:
        now = time.monotonic()
        for target in self._targets:
            timeout_s = min(timeout_s, target.connect_if_due(now))
        while self._leaving and self._leaving[0][0] <= now:
            wire = self._leaving.popleft()[1]
            if not wire.over.is_set():
                wire.hang_up()
        events = []
        for event in self._inbox.take(timeout_s):
            assert isinstance(event.wire, GrpcWire)
            wire = event.wire
            if event.lost is not None:
                self._leaving.append((time.monotonic() + _LEAVE_S, wire))
                for target in self._targets:
                    if target.wire is wire:
                        target.lost(wire.met)
                if not wire.met:
                    continue  # the peer never answered
            wire.met = True
            events.append(event)
        return events

    def close(self) -> None:
        """End all calls after a moment to flush what was sent. Does nothing in a fork of the owner."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        calls = [target.wire for target in self._targets if target.wire is not None]
        for wire in calls:
            wire.close()
        self._inbox.close()
        until = time.monotonic() + _CLOSE_S
        for wire in [*(wire for wire in calls if wire.met), *(wire for _, wire in self._leaving if wire.initiated)]:
            wire.over.wait(max(0.0, until - time.monotonic()))
        # Closing a channel to a stopped peer waits until pings time out, so do it in the background.
        closers = [threading.Thread(target=target.channel.close, daemon=True) for target in self._targets]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(max(0.0, until + _CLOSE_S - time.monotonic()))
        if self._server is not None:
            for wire in list(self._calls):
                wire.close()
            self._server.stop(_CLOSE_S).wait(2 * _CLOSE_S)

    def _listen(self, address: Address) -> int:
        self._calls: set[GrpcWire] = set()
        self._server = self._grpc.server(Threads(), options=OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
        handler = self._grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((self._grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        host = f"[{address.host}]" if ":" in address.host else address.bind_host
        try:
            port = int(self._server.add_insecure_port(f"{host}:{address.port}"))
        except RuntimeError:
            port = 0
        if not port:
            raise UserError(
                f"Cannot listen on {address.url} (the port is in use, or the address is not of this machine); choose "
                "a different host or port."
            )
        self._server.start()
        return port

    def _serve(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        wire = GrpcWire(self._inbox, context.peer().partition(":")[2], initiated=False)
        wire.hang_up = context.cancel
        self._calls.add(wire)
        try:
            if context.add_callback(wire.stop_writing) and self._inbox.put(Event(wire)):
                threading.Thread(target=wire.read, args=(requests,), daemon=True).start()
                context.send_initial_metadata(ANSWER)
                yield from wire.outgoing()
        finally:
            self._calls.discard(wire)
            wire.over.set()


class _GrpcTarget:
    """An address and its call. One channel forever: with new ones, calls may hang past their deadline (grpcio 1.85)."""

    def __init__(self, grpc: Any, address: Address, inbox: _Inbox):
        self._url, self._inbox = address.url, inbox
        self.channel = grpc.insecure_channel(address.url.partition("://")[2], options=OPTIONS)
        self._method = self.channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self.wire: GrpcWire | None = None
        self._due, self._backoff = 0.0, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, jitter=0.3)

    def connect_if_due(self, now: float) -> float:
        """Call if it is time to; returns the seconds until it is."""
        if self.wire is not None:
            return 60.0
        if self._due > now:
            return self._due - now
        self.wire = wire = GrpcWire(self._inbox, self._url, initiated=True)
        # Until the peer listens, the channel retries by itself, with pauses.
        call = self._method(wire.outgoing(), wait_for_ready=True)
        wire.hang_up = call.cancel
        threading.Thread(target=self._read, args=(wire, call), daemon=True).start()
        return 60.0

    def lost(self, met: bool) -> None:
        """The call is over: retry soon, or with growing pauses if it was never answered."""
        if met:
            self._backoff.reset()
        self._due, self.wire = time.monotonic() + self._backoff.next(), None

    def _read(self, wire: GrpcWire, call: Any) -> None:
        with contextlib.suppress(Exception):  # what ends the call is raised again when it is read
            if set(ANSWER) <= {tuple(pair) for pair in call.initial_metadata() or ()}:
                self._inbox.put(Event(wire))
                wire.read(call)
            for _ in call:  # to its end, by which the peer confirms that it has received everything
                pass
        wire.end("nothing of the link listens there")
        wire.over.set()
