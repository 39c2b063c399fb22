"""Where workers of a gRPC VecEnv dial in: each gets a place that is open, or a sentence that says why not.

Threads of gRPC's own read and write; the VecEnv takes what they read from one queue, and opens places.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

from corral import __version__
from corral.core.encoding import DecodeError
from corral.core.errors import UserError
from corral.envs import grpc_wire as wire
from corral.link.transports import grpc as rpc

log = logging.getLogger("corral.envs")

_MAX_WAITING = 64  # messages, beside one for each environment
_AT_THE_DOOR = 16  # calls beyond those of the workers, which are told to come back later
_PUT_S = 1.0
_STOP_S = 5.0

JOINED, LOST = -1, -2  # what a link says itself


class Link:
    """One worker's call."""

    def __init__(self, place: int, peer: str, room: int):
        self.place, self.peer = place, peer
        self._outbox: queue.Queue[bytes | tuple[str, str]] = queue.Queue(room)

    def send(self, op: int, data: Any = None) -> None:
        """Send a message; a worker that lets too many pile up is given up."""
        try:
            self._outbox.put_nowait(wire.to_bytes(op, data))
        except queue.Full:
            self.end("ABORTED", "it does not read what it is sent")

    def end(self, status: str, words: str) -> None:
        """End the call with this status, after what was sent before if there is room for more."""
        with contextlib.suppress(queue.Full, queue.Empty):
            if self._outbox.full():
                self._outbox.get_nowait()
            self._outbox.put_nowait((status, words))

    def outgoing(self) -> Iterator[bytes | tuple[str, str]]:
        """What to send, up to and with the status to end with."""
        while True:
            item = self._outbox.get()
            yield item
            if isinstance(item, tuple):
                return


class Door:
    """A gRPC server with a place for each worker."""

    def __init__(self, listen: str, places: int, num_envs: int):
        self._grpc = grpc = rpc.import_grpc()
        self._places, self._room = places, num_envs + _MAX_WAITING
        self._open: dict[int, Any] = {}  # places that wait for a worker, and what it will be told first
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._owner = os.getpid()
        self._warned: set[str] = set()
        self.inbox: queue.Queue[tuple[Link, int, Any]] = queue.Queue(self._room)
        """What workers say: their link, the message's number, and its value."""
        most = places + _AT_THE_DOOR
        self._server = grpc.server(rpc.Threads(), options=wire.OPTIONS, maximum_concurrent_rpcs=most)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, {wire.METHOD: handler}),)
        )
        self.address = self._bind(listen)
        self._server.start()

    def _bind(self, listen: str) -> str:
        host = wire.check_address(listen, "listen").rpartition(":")[0]
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError:
            port = 0
        if not port:
            raise UserError(
                f"Cannot listen on {listen}: another program does, or {host} is no address of this machine; choose "
                "another port, or 0.0.0.0 for all addresses."
            )
        return f"{host}:{port}"

    def open(self, place: int, job: Any) -> None:
        """Give this place to the next worker that dials in."""
        with self._lock:
            self._links.pop(place, None)
            self._open[place] = job

    def close(self) -> None:
        """Tell all workers that the run is over. A fork of the owner has no business here."""
        if os.getpid() != self._owner or self._closed:
            return
        self._closed = True
        with self._lock:
            self._open.clear()
            links = list(self._links.values())
        for link in links:
            link.end("OK", "")
        self._server.stop(_STOP_S).wait(2 * _STOP_S)

    # -- in gRPC's threads ---------------------------------------------------------------------------------

    def _serve(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """One worker's call, from its start to its end."""
        codes = self._grpc.StatusCode
        about = dict(context.invocation_metadata())
        host, theirs = about.get(wire.HOST, context.peer()), about.get(wire.VERSION)
        if theirs != __version__:
            words = f"Corral {theirs} is installed here, and the learner has {__version__}: install the same one."
            self._warn(f"a worker on {host} was refused: it has Corral {theirs}, and this is {__version__}")
            context.abort(codes.FAILED_PRECONDITION, words)
        link = self._claim(f"{host} (process {about.get(wire.PID, '?')})")
        if link is None:
            context.abort(codes.RESOURCE_EXHAUSTED, f"all {self._places} places are taken")
            return
        context.add_callback(lambda: link.end("CANCELLED", ""))
        threading.Thread(target=self._read, args=(link, requests), daemon=True).start()
        for item in link.outgoing():
            if isinstance(item, bytes):
                yield item
            elif item[0] != "OK":
                context.abort(getattr(codes, item[0]), item[1])

    def _claim(self, peer: str) -> Link | None:
        with self._lock:
            if self._closed or not self._open:
                return None
            place = min(self._open)
            link = self._links[place] = Link(place, peer, self._room)
            job = self._open.pop(place)
        self._put(link, JOINED)
        link.send(wire.BUILD, job)
        return link

    def _read(self, link: Link, requests: Iterator[bytes]) -> None:
        status, words = "OK", "it left, or the connection was lost"
        try:
            for data in requests:
                self._put(link, *wire.from_bytes(data))
        except (DecodeError, TypeError) as error:
            status, words = "ABORTED", f"it sent what is no message ({error})"
        except Exception:  # gRPC's way to say that the call has ended; sometimes the requests just end
            pass
        self._put(link, LOST, words)
        link.end(status, words)  # by which a worker that left knows that all it said has arrived

    def _put(self, link: Link, op: int, data: Any = None) -> None:
        """A queue that is full holds the worker up, by HTTP/2's flow control."""
        while not self._closed:
            with contextlib.suppress(queue.Full):
                self.inbox.put((link, op, data), timeout=_PUT_S)
                return

    def _warn(self, words: str) -> None:
        """Once: a worker that is started again and again is refused as often."""
        if words not in self._warned and len(self._warned) < _MAX_WAITING:
            self._warned.add(words)
            log.warning("%s", words)
