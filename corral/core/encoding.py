"""Values on the wire: a small MessagePack head, and arrays as raw memory. No pickle.

A value is None, a bool, a number, text, bytes, an array, or lists, tuples (which arrive as lists) and dicts with text
keys of values. Arrays of a received value are views of its buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from corral.core.types import Array

Value = Any
Buffer = bytes | bytearray | memoryview

_HEAD = struct.Struct("<Q")
_ALIGN = 64
_ARRAY, _BIG_INT = 1, 2  # MessagePack extensions: (position, dtype, shape), and decimal text of integers beyond 64 bits
MAX_BYTES = 1 << 32
# What invalid bytes raise; NumPy parses names of dtypes as Python, hence SyntaxError.
_INVALID = struct.error, ValueError, TypeError, OverflowError, RecursionError, SyntaxError, msgspec.DecodeError


class DecodeError(Exception):
    """Bytes that are not a valid message."""


def encode(value: Value) -> list[Buffer]:
    """A value as buffers to send one after the other; arrays are not copied."""
    arrays: list[Array] = []
    at = 0

    def hook(item: Any) -> Any:
        nonlocal at
        if isinstance(item, np.generic):
            return item.item()
        if not isinstance(item, np.ndarray) or item.dtype.hasobject:
            raise TypeError(f"a {type(item).__name__} cannot be sent")
        array = np.ascontiguousarray(item)
        arrays.append(array)
        place, at = at, at + _padded(array.nbytes)
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((place, array.dtype.str, item.shape)))

    try:
        head = msgspec.msgpack.encode(value, enc_hook=hook)
    except OverflowError:  # states of RNGs have such numbers
        arrays.clear()
        at = 0
        head = msgspec.msgpack.encode(_with_big_ints(value), enc_hook=hook)
    parts: list[Buffer] = [_HEAD.pack(len(head)) + head + bytes(_padding(_HEAD.size + len(head)))]
    for array in arrays:
        if array.nbytes:
            parts.append(array.reshape(-1).view(np.uint8).data)
            if _padding(array.nbytes):
                parts.append(bytes(_padding(array.nbytes)))
    return parts


def decode(data: Buffer) -> Value:
    """The value given to `encode`; DecodeError if the bytes are invalid."""
    view = memoryview(data)
    try:
        (size,) = _HEAD.unpack_from(view)
        start = _padded(_HEAD.size + size)

        def hook(code: int, part: memoryview) -> Array | int:
            if code == _BIG_INT:
                return int(bytes(part))
            if code != _ARRAY:
                raise DecodeError(f"unknown extension {code}")
            place, name, shape = msgspec.msgpack.decode(part, type=tuple[int, str, tuple[int, ...]])
            dtype = np.dtype(name)
            if dtype.hasobject or place < 0 or any(n < 0 for n in shape):
                raise DecodeError("an array with an invalid dtype, position or shape")
            count = int(np.prod(shape, dtype=np.int64))
            if not count:
                return np.empty(shape, dtype)
            return np.frombuffer(view, dtype, count, start + place).reshape(shape)

        return msgspec.msgpack.decode(view[_HEAD.size : _HEAD.size + size], ext_hook=hook)
    except _INVALID as error:
        raise DecodeError(str(error)) from error


def size_of(parts: Sequence[Buffer]) -> int:
    """Bytes of an encoded value."""
    return sum(len(part) for part in parts)


def arrays_bytes(value: Value) -> int:
    """Bytes of the arrays in a value."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(arrays_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(arrays_bytes, value))
    return 0


def _with_big_ints(value: Value) -> Value:
    if isinstance(value, dict):
        return {key: _with_big_ints(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_big_ints(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_BIG_INT, str(value).encode())
    return value


def _padding(size: int) -> int:
    return -size % _ALIGN


def _padded(size: int) -> int:
    return size + _padding(size)
