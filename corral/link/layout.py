"""The position of a batch's leaves within a frame: both sides compute the same table from the spaces."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from corral.core.encoding import Buffer
from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.core.types import Array
from corral.link.message import BadMessage

_ALIGN = 64
_MAX_LEAVES, _MAX_DEPTH = 256, 8
_MAX_BYTES = 1 << 28  # of memory, per space of observations or actions
_DTYPES = {
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
}  # fmt: skip

_Cell = tuple[np.dtype[Any], tuple[int, ...]]


class LeafGroup:
    """Leaves of some rows in one frame: each `[B, *shape]`, one after the other at multiples of 64 bytes."""

    def __init__(self, cells: Sequence[_Cell]):
        self._cells = [(dtype, shape, dtype.itemsize * math.prod(shape)) for dtype, shape in cells]
        self.row_bytes = sum(size for _, _, size in self._cells)
        self._places = lru_cache(maxsize=256)(self._find_places)

    def size(self, batch: int) -> int:
        return self._places(batch)[1]

    def read(self, frame: Buffer, batch: int) -> list[Array]:
        """The frame's leaves as views; BadMessage when its size is wrong."""
        places, size = self._places(batch)
        if len(frame) != size:
            raise BadMessage(f"a frame of {len(frame)} bytes for {batch} rows, expected {size}")
        return [np.frombuffer(frame, dtype, count, at).reshape(shape) for at, count, shape, dtype in places]

    def spans(self, batch: int) -> tuple[list[tuple[int, int]], int]:
        """Start and end of each leaf in a frame of this many rows, and the frame's size."""
        places, size = self._places(batch)
        return [(at, at + count * dtype.itemsize) for at, count, _, dtype in places], size

    def make(self, batch: int) -> tuple[bytearray, list[Array]]:
        places, size = self._places(batch)
        frame = bytearray(size)
        return frame, [np.frombuffer(frame, dtype, count, at).reshape(shape) for at, count, shape, dtype in places]

    def write(self, leaves: Sequence[Array], batch: int) -> Buffer:
        """A frame of these leaves (right dtypes and shapes): a copy, because it may have to be resent."""
        if len(self._cells) == 1:  # the common case needs no padding
            return leaves[0].tobytes()
        frame, room = self.make(batch)
        for place, leaf in zip(room, leaves, strict=True):
            place[...] = leaf
        return frame

    def _find_places(self, batch: int) -> tuple[list[tuple[int, int, tuple[int, ...], np.dtype[Any]]], int]:
        places, at, end = [], 0, 0
        for dtype, shape, size in self._cells:
            places.append((at, batch * math.prod(shape), (batch, *shape), dtype))
            end = at + batch * size
            at = -(-end // _ALIGN) * _ALIGN
        return places, end


def space_group(layout: Layout) -> LeafGroup:
    """The group of a space's leaves."""
    return LeafGroup([(leaf.dtype, leaf.shape) for leaf in layout.leaves])


@dataclass(frozen=True)
class RowsLayout:
    """The group `rows`: rewards, flags, status, and the fields that depend on the simulator."""

    players: int = 1
    raw_reward: bool = False

    def group(self) -> LeafGroup:
        reward: _Cell = (np.dtype(np.float64), (self.players,))
        cells: list[_Cell] = [reward] + [reward] * self.raw_reward
        cells += [(np.dtype(np.uint8), ()), (np.dtype(np.uint16), ())]
        return LeafGroup(cells + [(np.dtype(np.int8), ())] * (self.players > 1))


def layout_hash(observation: Layout, action: Layout) -> int:
    """CRC-32 of both leaf tables, which every header carries."""
    data = b""
    for table in (observation, action):
        for leaf in table.leaves:
            path = ".".join(map(str, leaf.path))
            data += path.encode() + b"\0" + leaf.dtype.name.encode() + b"\0"
            data += struct.pack(f"<B{len(leaf.shape)}I", len(leaf.shape), *leaf.shape)
        data += b"\xff"
    return zlib.crc32(data)


def read_space(data: Any, what: str) -> Layout:
    """The space that a simulator describes; BadMessage with the reason when it is invalid."""
    require_modest(data, what)
    try:
        layout = Layout.from_json(data)
    except (UserError, KeyError, TypeError, ValueError, AssertionError, AttributeError, OverflowError) as error:
        raise BadMessage(f"{what} space {str(data)[:200]} that cannot be built ({repr(error)[:200]})") from error
    if not layout.leaves:
        raise BadMessage(f"{what} space without leaves")
    return layout


def require_modest(data: Any, what: str) -> int:
    """BadMessage if building this space would cost too much; at least the bytes of one of its values."""
    leaves = nbytes = cost = 0
    for part in _parts(data, what, _MAX_DEPTH):
        leaves += not part.get("spaces")
        count, itemsize = _part_size(part, what)
        nbytes += count * itemsize
        cost += count * (2 * itemsize + 2)  # lower and upper bounds, and which of them exist
        if leaves > _MAX_LEAVES:
            raise BadMessage(f"{what} space of more than {_MAX_LEAVES} leaves")
        if cost > _MAX_BYTES:
            raise BadMessage(f"{what} space that takes more than {_MAX_BYTES >> 20} MiB of memory, which is too large")
    return nbytes


def _parts(data: Any, what: str, depth: int) -> Iterator[dict[str, Any]]:
    """The description and, recursively, those of its components."""
    if not isinstance(data, dict):
        raise BadMessage(f"{what} space is described by {type(data).__name__}, expected a map")
    if depth < 0:
        raise BadMessage(f"{what} space nested more than {_MAX_DEPTH} deep")
    subspaces = data.get("spaces", [])
    if not isinstance(subspaces, list) or len(subspaces) > _MAX_LEAVES:
        raise BadMessage(f"{what} space with {str(subspaces)[:100]} as its subspaces")
    yield data
    for entry in subspaces:
        named = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
        yield from _parts(entry[1] if named else entry, what, depth - 1)


def _part_size(data: dict[str, Any], what: str) -> tuple[int, int]:
    """Numbers in a value of this space, at least, and the bytes of one."""
    shape = data.get("shape", [])
    if not isinstance(shape, list) or len(shape) > 16 or not all(isinstance(n, int) and 0 <= n < 2**31 for n in shape):
        raise BadMessage(f"{what} space with shape {str(shape)[:100]}")
    count = data.get("n", 0)
    counts = count if isinstance(count, list) else [count] if data.get("type") == "multi_binary" else []
    if len(counts) > 16 or not all(isinstance(n, int) and 0 <= n < 2**31 for n in counts):
        raise BadMessage(f"{what} space with the invalid n {str(count)[:100]}")
    dtype = data.get("dtype", "int8")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise BadMessage(f"{what} space with dtype {str(dtype)[:100]}, which the link does not carry")
    size = max(math.prod(shape), math.prod(counts), len(counts), 1)
    return size, np.dtype(dtype).itemsize if "dtype" in data else 8


def space_difference(ours: Layout, theirs: Layout, what: str) -> str | None:
    """What keeps two simulators from sharing a batch, as text; None if nothing does."""
    if ours == theirs:
        return None
    if len(ours.leaves) != len(theirs.leaves):
        return f"{what} space {theirs.space} where others have {ours.space}"
    for left, right in zip(ours.leaves, theirs.leaves, strict=True):
        if left.path != right.path:
            return f"{what} leaf '{right.name}' where others have '{left.name}'"
        if left.space != right.space or left.dtype != right.dtype:
            return f"{what} leaf '{right.name}' in {right.space} where others have {left.space}"
    return f"{what} space {theirs.space} where others have {ours.space}"
