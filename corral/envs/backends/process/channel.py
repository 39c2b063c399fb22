"""Framed messages to workers over a socket pair each; observations and actions are in shared memory instead."""

from __future__ import annotations

import socket
import struct

from corral.core.encoding import Value, encode

_HEADER = struct.Struct("<BI")
_READ_BYTES = 1 << 16


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end of a worker's socket."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._room = bytearray(_READ_BYTES)  # reused, because a new buffer of this size costs a system call
        self._rest = bytearray()  # of an incomplete message

    def fileno(self) -> int:
        return self._socket.fileno()

    def send_frame(self, data: bytes) -> None:
        """Send a message made by `frame`; ChannelClosed when the other side does not read it."""
        try:
            self._socket.sendall(data)
        except (ConnectionError, TimeoutError) as error:
            raise ChannelClosed from error

    def send(self, op: int, value: Value = None) -> None:
        self.send_frame(frame(op, b"".join(encode(value))))

    def read(self) -> list[tuple[int, bytes]]:
        """Wait for bytes and return the complete messages among them; ChannelClosed at the end."""
        try:
            size = self._socket.recv_into(self._room)
        except (ConnectionError, TimeoutError) as error:
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
        self._socket.close()


def frame(op: int, payload: bytes) -> bytes:
    """Encode one message."""
    return _HEADER.pack(op, len(payload)) + payload
