"""Messages as bytes of a stream: magic, number of frames, their lengths, the frames."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from corral.core.encoding import Buffer
from corral.link.protocol import MAX_FRAMES

MAGIC = b"CLP1"
_PREFIX = struct.Struct("<4sI")
_HEADS = [struct.Struct(f"<4sI{count}I") for count in range(MAX_FRAMES + 1)]
_LENGTHS = [struct.Struct(f"<{count}I") for count in range(MAX_FRAMES + 1)]
_ROOM = 1 << 18
_TOGETHER = 1 << 14  # smaller messages are joined: one system call with one buffer is cheapest


class BadFrames(Exception):
    """Bytes that are not a valid message."""


def pack(frames: Sequence[Buffer]) -> list[Buffer]:
    """Frames preceded by their lengths."""
    lengths = list(map(len, frames))
    prefix = _HEADS[len(lengths)].pack(MAGIC, len(lengths), *lengths)
    if sum(lengths) < _TOGETHER:
        return [b"".join((prefix, *frames))]
    return [prefix, *frames]


def unpack(data: bytes, max_bytes: int) -> list[memoryview]:
    """The frames of a whole message; BadFrames when it is invalid."""
    magic, count = _PREFIX.unpack_from(data) if len(data) >= _PREFIX.size else (b"", 0)
    if magic != MAGIC:
        raise BadFrames("bytes that are not of this protocol")
    if not 1 <= count <= MAX_FRAMES:
        raise BadFrames(f"a message of {count} frames")
    at = _PREFIX.size + 4 * count
    lengths = _LENGTHS[count].unpack_from(data, _PREFIX.size) if len(data) >= at else ()
    total = sum(lengths)
    if total > max_bytes:
        raise BadFrames(f"a message of {total} bytes, at most {max_bytes} are accepted")
    if not lengths or at + total != len(data):
        raise BadFrames(f"a message of {len(data)} bytes whose header announces {at + total}")
    return _cut(memoryview(data), lengths, at)


class FrameReader:
    """Turns received bytes into messages; large ones are read into buffers of their exact size."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._room = bytearray(_ROOM)
        self._view = memoryview(self._room)
        self._start = self._end = 0
        self._big: bytearray | None = None
        self._big_lengths: tuple[int, ...] = ()
        self._filled = 0

    def room(self) -> memoryview:
        if self._big is not None:
            return memoryview(self._big)[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start > 0 and self._end > _ROOM // 2:
            size = self._end - self._start
            self._room[:size] = self._room[self._start : self._end]
            self._start, self._end = 0, size
        return self._view[self._end :] if self._end else self._view

    def took(self, size: int) -> None:
        if self._big is not None:
            self._filled += size
        else:
            self._end += size

    @property
    def empty(self) -> bool:
        return self._start == self._end and self._big is None

    def next(self) -> list[memoryview] | None:
        """The next complete message; BadFrames when the bytes are invalid."""
        if self._big is not None:
            if self._filled < len(self._big):
                return None
            body, self._big = memoryview(self._big), None
            return _cut(body, self._big_lengths)
        start = self._start
        size = self._end - start
        if size < _PREFIX.size:
            if size and self._room[start : min(self._end, start + 4)] != MAGIC[:size]:
                raise BadFrames("bytes that are not of this protocol")
            return None
        magic, count = _PREFIX.unpack_from(self._room, start)
        if magic != MAGIC:
            raise BadFrames("bytes that are not of this protocol")
        if not 1 <= count <= MAX_FRAMES:
            raise BadFrames(f"a message of {count} frames")
        head = _PREFIX.size + 4 * count
        if size < head:
            return None
        lengths = _LENGTHS[count].unpack_from(self._room, start + _PREFIX.size)
        total = sum(lengths)
        if total > self.max_bytes:
            raise BadFrames(f"a message of {total} bytes, at most {self.max_bytes} are accepted")
        if size >= head + total:
            self._start = start + head + total
            return _cut(self._view, lengths, start + head)
        if head + total > _ROOM // 2:
            self._big, self._big_lengths, self._filled = bytearray(total), lengths, size - head
            self._big[: size - head] = self._view[start + head : self._end]
            self._start = self._end = 0
        return None


def _cut(body: memoryview, lengths: Sequence[int], at: int = 0) -> list[memoryview]:
    frames = []
    for length in lengths:
        frames.append(body[at : at + length])
        at += length
    return frames
