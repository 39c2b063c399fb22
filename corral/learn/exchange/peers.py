"""TCP connections between learners, authenticated by the run's secret."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable

from corral.learn.exchange.base import PeerLost
from corral.runtimes.connection import Connection

_SECRET_BYTES = 32
_HELLO_S = 10.0
_BACKLOG = 128
_PAUSE_S = 0.05
_SILENCE_MS = 60_000  # without an answer from a machine that disappeared


def new_secret() -> bytes:
    """The secret by which the learners of a run authenticate each other."""
    return secrets.token_bytes(_SECRET_BYTES)


class Listener:
    """Accepts connections, each in its own thread, until closed."""

    def __init__(self, host: str, secret: bytes, serve: Callable[[Connection], None], send_timeout_s: float):
        self._secret, self._serve, self._send_timeout_s = secret, serve, send_timeout_s
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._guests: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # closed, or a client disconnected early, or out of file descriptors
                time.sleep(_PAUSE_S)
                continue
            threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(_HELLO_S)
            received = b""
            while len(received) < _SECRET_BYTES and (more := sock.recv(_SECRET_BYTES - len(received))):
                received += more
            if not hmac.compare_digest(received, self._secret):
                return
            _set_up(sock)
            self._guests.add(sock)
            try:
                self._serve(Connection(sock, self._send_timeout_s))
            finally:
                self._guests.discard(sock)

    def close(self) -> None:
        self._closed = True
        for sock in (self._socket, *list(self._guests)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # otherwise its thread would keep waiting
        self._socket.close()


def connect(host: str, port: int, secret: bytes, timeout_s: float) -> Connection:
    """Connect to a listener; PeerLost if there is none."""
    try:
        sock = socket.create_connection((host, port), timeout_s)
        _set_up(sock)
        sock.sendall(secret)
        return Connection(sock, timeout_s)
    except OSError as error:
        raise PeerLost(f"{host}:{port} cannot be reached: {error}") from error


def _set_up(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_MS // 2000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_MS // 6000)


def own_address(host: str, port: int = 9) -> str:
    """The address of this machine on the route to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])
