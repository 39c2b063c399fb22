"""Frames with values over a socket, in both directions."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence

from corral.core.encoding import MAX_BYTES, Buffer, size_of
from corral.core.portable import READABLE, WRITABLE, new_poll

_FRAME = struct.Struct("<BIQ")  # kind, number of the call, bytes that follow
_MAX_PARTS = 64  # buffers per system call; the kernel takes at most 1024


class ConnectionClosed(Exception):
    """The other side is gone, or does not read."""


class Connection:
    """One end. Any thread may send; one reads."""

    def __init__(self, sock: socket.socket, send_timeout_s: float | None):
        self._socket, self._lock, self._send_timeout_s = sock, threading.Lock(), send_timeout_s
        sock.setblocking(False)
        self._head = bytearray(_FRAME.size)
        self._body: bytearray | None = None
        self._filled = 0
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: int, number: int, parts: Sequence[Buffer] = ()) -> None:
        """Send one frame; ConnectionClosed when the other side does not read it."""
        left: list[Buffer] = [_FRAME.pack(kind, number, size_of(parts)), *parts]
        with self._lock:
            try:
                while left:
                    try:
                        left = _after(left, self._send_some(left))
                    except BlockingIOError:
                        if not self._poll(WRITABLE, self._send_timeout_s):
                            raise TimeoutError(f"it has not read for {self._send_timeout_s:g} s") from None
            except (OSError, ValueError) as error:  # a frame may be half sent: the connection cannot continue
                self.closed = True
                raise ConnectionClosed(str(error)) from error

    def _send_some(self, parts: list[Buffer]) -> int:
        if hasattr(self._socket, "sendmsg"):
            return self._socket.sendmsg(parts[:_MAX_PARTS])
        return self._socket.send(parts[0])  # Windows

    def read(self, *, wait: bool, timeout_s: float | None = None) -> tuple[int, int, bytearray] | None:
        """The next frame (kind, number, body); None if incomplete without `wait`; ConnectionClosed on timeout."""
        while True:
            target = self._head if self._body is None else self._body
            if self._filled < len(target):
                try:
                    size = self._socket.recv_into(memoryview(target)[self._filled :])
                except BlockingIOError:
                    if not wait:
                        return None
                    if not self._poll(READABLE, timeout_s):
                        raise ConnectionClosed(f"nothing received for {timeout_s:g} s") from None
                    continue
                except OSError as error:
                    raise ConnectionClosed(str(error)) from error
                if not size:
                    raise ConnectionClosed("the other side has ended")
                self._filled += size
                continue
            if self._body is None:
                length = _FRAME.unpack(self._head)[2]
                if length > MAX_BYTES:
                    raise ConnectionClosed(f"a frame of {length} bytes")
                self._body, self._filled = bytearray(length), 0
                continue
            kind, number, _ = _FRAME.unpack(self._head)
            body, self._body, self._filled = self._body, None, 0
            return kind, number, body

    def _poll(self, event: int, timeout_s: float | None) -> bool:
        poll = new_poll()
        poll.register(self._socket.fileno(), event)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        self.closed = True
        self._socket.close()


def _after(parts: list[Buffer], sent: int) -> list[Buffer]:
    for k, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part)[sent:], *parts[k + 1 :]]
        sent -= len(part)
    return []
