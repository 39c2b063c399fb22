"""Child processes with nothing that Windows or macOS lacks: loopback connections instead of descriptors and signals.

The parent listens at a port of the loopback device until its child has connected twice and sent the secret that the
parent wrote to the child's standard input, a file without a name. One connection carries messages, the other the
parent's orders: to dump the stacks, to stop. When that one closes, the parent is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from corral.core.portable import signal_main_thread
from corral.runtimes.child import ChildProcess, executable, plug_stdio, serve_parent
from corral.runtimes.orphan_reaper import OWN_GROUP, OrphanReaper
from corral.runtimes.portable_reaper import end_group
from corral.runtimes.shared_memory import SharedMemory, open_memory

_BOOT = (
    "import json, sys; start = json.load(open(0, encoding='utf-8', closefd=False)); sys.path[:] = start['path']; "
    "from corral.runtimes.portable_child import run; run(sys.argv.pop(), start)"
)
_MESSAGES, _ORDERS = b"m", b"o"
_DUMP, _STOP = b"d", b"s"
_SECRET_BYTES = 32
_CONNECT_S = 60.0  # to start an interpreter on a busy machine
_HELLO_S = 2.0  # to send the secret, once connected
_ACCEPT_S = 0.1  # between looks at whether the child has ended


class PortableChild(ChildProcess):
    """The parent's side."""

    def __init__(self, target: str, memories: Sequence[SharedMemory], reaper: OrphanReaper):
        plug_stdio()
        self._reaper, self._killed, secret = reaper, False, secrets.token_bytes(_SECRET_BYTES)
        for memory in memories:
            if memory.path is not None:
                reaper.watch_file(memory.path)
        with tempfile.TemporaryFile() as file, socket.create_server(("127.0.0.1", 0)) as listener:
            start = {
                "path": [entry for entry in sys.path if isinstance(entry, str)],
                "port": listener.getsockname()[1],
                "secret": secret.hex(),
                "memories": [memory.token for memory in memories],
            }
            file.write(json.dumps(start).encode())
            file.seek(0)
            self._dump_fd = os.dup(file.fileno())
            self._process = subprocess.Popen(
                [executable(), "-c", _BOOT, target],
                stdin=file,
                env=self._environ(),
                **OWN_GROUP,
            )
            reaper.watch(self.pid)
            try:
                self.socket, self._orders = self._accept(listener, secret)
            except BaseException:
                self.kill()
                os.close(self._dump_fd)
                raise

    def _accept(self, listener: socket.socket, secret: bytes) -> tuple[socket.socket, socket.socket]:
        """The child's two connections; closed ones if it does not connect."""
        found: dict[bytes, socket.socket] = {}
        until = time.monotonic() + _CONNECT_S
        listener.settimeout(_ACCEPT_S)
        while len(found) < 2 and not self.has_ended() and time.monotonic() < until:
            with contextlib.suppress(OSError):  # TimeoutError; a stranger who left
                sock, _ = listener.accept()
                purpose = _check(sock, secret)
                if purpose in found or purpose is None:
                    sock.close()
                else:
                    found[purpose] = sock
        if len(found) < 2:
            for purpose in {_MESSAGES, _ORDERS} - found.keys():
                found[purpose], theirs = socket.socketpair()
                theirs.close()
        return found[_MESSAGES], found[_ORDERS]

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def terminate(self) -> None:
        self._order(_STOP)

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            end_group(self.pid)  # its processes, even if it has ended; their group keeps its id from being reused
            self._process.kill()
            self._process.wait()
            self._reaper.unwatch(self.pid)
            self._end_marked()

    def _request_dump(self) -> None:
        self._order(_DUMP)

    def _order(self, order: bytes) -> None:
        with contextlib.suppress(OSError):
            self._orders.send(order)

    @property
    def stacks(self) -> str:
        return _read_all(self._dump_fd) if self._process.returncode is not None else ""  # one position for both

    def close(self) -> None:
        self._orders.close()
        super().close()


def _check(sock: socket.socket, secret: bytes) -> bytes | None:
    """What a connection is for; None unless it begins with the secret."""
    sock.settimeout(_HELLO_S)
    received = b""
    with contextlib.suppress(OSError):
        while len(received) <= _SECRET_BYTES and (more := sock.recv(_SECRET_BYTES + 1 - len(received))):
            received += more
    if not hmac.compare_digest(received[:_SECRET_BYTES], secret):
        return None
    _set_up(sock)
    return received[_SECRET_BYTES:]


def _set_up(sock: socket.socket) -> None:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _read_all(fd: int) -> str:
    os.lseek(fd, 0, os.SEEK_SET)
    pieces = []
    while piece := os.read(fd, 1 << 16):
        pieces.append(piece)
    return b"".join(pieces).decode(errors="replace")


def run(target: str, start: dict[str, Any]) -> NoReturn:
    """The child's side."""
    dump_fd = os.dup(0)
    os.lseek(dump_fd, 0, os.SEEK_SET)
    os.ftruncate(dump_fd, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    dump = os.fdopen(dump_fd, "w")
    faulthandler.enable(dump)  # a crash leaves its stack where the parent can read it
    secret = bytes.fromhex(start["secret"])
    sock, orders = (_connect(start["port"], secret + purpose) for purpose in (_MESSAGES, _ORDERS))
    threading.Thread(target=_obey, args=(orders, dump), daemon=True).start()
    serve_parent(target, sock, [open_memory(_token(token)) for token in start["memories"]])


def _token(token: Any) -> tuple[str, int]:
    name, size = token
    return name, size


def _connect(port: int, greeting: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), _CONNECT_S)
    _set_up(sock)
    sock.sendall(greeting)
    return sock


def _obey(orders: socket.socket, dump: TextIO) -> None:
    """Follow the parent's orders; end this process, and what it started, when the parent is gone."""
    with contextlib.suppress(OSError):
        while order := orders.recv(1):
            if order == _DUMP:
                faulthandler.dump_traceback(dump, all_threads=True)
            elif signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                break
            else:
                signal_main_thread(signal.SIGTERM)
    end_group(os.getpid())
    os._exit(1)
