"""Framed messages between a process VecEnv and its workers, over one socket pair per worker.

Observations and actions never travel here: they are in shared memory, and a message names the rows.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<BI")
_READ_BYTES = 1 << 16

# parent to worker
ROWS, RESET, STEP, CLOSE = range(4)
# worker to parent
SPEC, READY, FAULT, FAILED = range(10, 14)


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """One end of a worker's socket."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._room = bytearray(_READ_BYTES)  # kept, because a fresh buffer of this size costs a system call
        self._rest = b""

    def fileno(self) -> int:
        """File descriptor to poll."""
        return self._socket.fileno()

    def send(self, op: int, payload: bytes = b"") -> None:
        """Send one message; Closed when nobody will read it."""
        self.send_frame(frame(op, payload))

    def send_frame(self, data: bytes) -> None:
        """Send a message that `frame` has made."""
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError, TimeoutError) as error:
            raise Closed from error

    def send_json(self, op: int, data: Any) -> None:
        """Send one message with a JSON payload."""
        self.send(op, json.dumps(data).encode())

    def read(self) -> list[tuple[int, bytes]]:
        """Wait for bytes and return the complete messages among them; Closed at the end."""
        try:
            size = self._socket.recv_into(self._room)
        except (ConnectionResetError, TimeoutError) as error:
            raise Closed from error
        if not size:
            raise Closed
        buffer = self._rest + self._room[:size]
        messages, start = [], 0
        while len(buffer) - start >= _HEADER.size:
            op, size = _HEADER.unpack_from(buffer, start)
            end = start + _HEADER.size + size
            if len(buffer) < end:
                break
            messages.append((op, buffer[start + _HEADER.size : end]))
            start = end
        self._rest = buffer[start:]
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def frame(op: int, payload: bytes) -> bytes:
    """One message as bytes."""
    return _HEADER.pack(op, len(payload)) + payload
