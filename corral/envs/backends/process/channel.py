"""Framed messages between a process VecEnv and its workers, over one socket pair per worker.

Observations and actions never travel here: they are in shared memory, and a message names the rows.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
from typing import Any

import numpy as np

_HEADER = struct.Struct("<BI")
_READ_BYTES = 1 << 16

# parent to worker
ROWS, RESET, STEP, CLOSE, RECORD, SAVE, LOAD = range(7)
# worker to parent
SPEC, READY, FAULT, FAILED, SAVED, LOADED, ALIVE = range(10, 17)


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end of a worker's socket."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._room = bytearray(_READ_BYTES)  # kept, because a fresh buffer of this size costs a system call
        self._rest = bytearray()  # of a message that is not complete

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
            raise ChannelClosed from error

    def send_json(self, op: int, data: Any) -> None:
        """Send one message with a JSON payload, which may hold arrays; `parse` reads it."""
        self.send(op, json.dumps(data, default=_from_array).encode())

    def read(self) -> list[tuple[int, bytes]]:
        """Wait for bytes and return the complete messages among them; Closed at the end."""
        try:
            size = self._socket.recv_into(self._room)
        except (ConnectionResetError, TimeoutError) as error:
            raise ChannelClosed from error
        if not size:
            raise ChannelClosed
        self._rest += self._room[:size]
        buffer = self._rest
        messages, start = [], 0
        while len(buffer) - start >= _HEADER.size:
            op, size = _HEADER.unpack_from(buffer, start)
            end = start + _HEADER.size + size
            if len(buffer) < end:
                break
            messages.append((op, bytes(buffer[start + _HEADER.size : end])))
            start = end
        del buffer[:start]
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def frame(op: int, payload: bytes) -> bytes:
    """One message as bytes."""
    return _HEADER.pack(op, len(payload)) + payload


def parse(payload: bytes) -> Any:
    """What `send_json` sent."""
    return json.loads(payload, object_hook=_to_array)


def _from_array(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a {type(value).__name__} has no JSON form")
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"$array": data, "dtype": value.dtype.str, "shape": value.shape}


def _to_array(node: dict[str, Any]) -> Any:
    if "$array" not in node:
        return node
    return np.frombuffer(base64.b64decode(node["$array"]), node["dtype"]).reshape(node["shape"]).copy()
