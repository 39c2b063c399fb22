"""Learners that reach each other by TCP: whoever knows the run's secret is let in, and frames follow."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable

from corral.connection import Connection
from corral.learn.exchange.contract import PeerLost

_SECRET_BYTES = 32
_HELLO_S = 10.0
_BACKLOG = 128


def new_secret() -> bytes:
    """What the learners of a run let each other in by."""
    return secrets.token_bytes(_SECRET_BYTES)


class Listener:
    """Lets others in, each in a thread of its own, until it is closed."""

    def __init__(self, host: str, secret: bytes, serve: Callable[[Connection], None], send_timeout_s: float):
        self._secret, self._serve, self._send_timeout_s = secret, serve, send_timeout_s
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._guests: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                sock, _ = self._socket.accept()
                threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(_HELLO_S)
            said = sock.recv(_SECRET_BYTES, socket.MSG_WAITALL)
            if not hmac.compare_digest(said, self._secret):
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._guests.add(sock)
            try:
                self._serve(Connection(sock, self._send_timeout_s))
            finally:
                self._guests.discard(sock)

    def close(self) -> None:
        """Let nobody in any more, and let everybody go."""
        for sock in (self._socket, *list(self._guests)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # or its thread would go on waiting
        self._socket.close()


def dial(host: str, port: int, secret: bytes, timeout_s: float) -> Connection:
    """A connection to a listener; PeerLost when there is none."""
    try:
        sock = socket.create_connection((host, port), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(secret)
        return Connection(sock, timeout_s)
    except OSError as error:
        raise PeerLost(f"{host}:{port} cannot be reached: {error}") from error


def own_address(host: str, port: int) -> str:
    """The address of this machine by which it reaches that host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])
