"""Ways to write a vector of float32 in fewer bytes. How many depends only on its length.

`qsgd` (Alistarh et al. 2017) is right in expectation. The others are off by what they leave out, which
`corral.learn.exchange.feedback` makes up for.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from corral.core.types import Array

_BUCKET = 512  # numbers with a scale of their own: one large gradient does not blur all others
_LARGEST_HALF = float(np.finfo(np.float16).max)


class Codec(Protocol):
    """Bytes for numbers, and back."""

    unbiased: bool
    """Whether the mean over many encodings is the vector itself."""

    def size(self, count: int) -> int:
        """Bytes of a vector of `count` numbers."""

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        """The bytes, as uint8. The values are finite float32."""

    def decode(self, code: Array, count: int) -> Array:
        """`count` numbers, as float32."""


class Whole:
    """As they are."""

    unbiased = True

    def size(self, count: int) -> int:
        """Four bytes each."""
        return 4 * count

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        """A copy: what it is of may change while it is on its way."""
        return np.array(values, np.float32).view(np.uint8)

    def decode(self, code: Array, count: int) -> Array:
        """The same memory."""
        return code.view(np.float32)


class Half:
    """The nearest float16; what is too large for it becomes the largest."""

    unbiased = False

    def size(self, count: int) -> int:
        """Two bytes each."""
        return 2 * count

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        """Round."""
        return np.clip(values, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16).view(np.uint8)

    def decode(self, code: Array, count: int) -> Array:
        """Widen."""
        return code.view(np.float16).astype(np.float32)


class Brain:
    """The nearest bfloat16: the range of float32 with 8 bits of precision."""

    unbiased = False

    def size(self, count: int) -> int:
        """Two bytes each."""
        return 2 * count

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        """Round."""
        rounded: Array = torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy()
        return rounded.view(np.uint8)  # torch would not make bytes of no numbers

    def decode(self, code: Array, count: int) -> Array:
        """Widen: the upper half of a float32."""
        wide = np.zeros(count, np.uint32)
        wide[:] = code.view(np.uint16)
        return (wide << 16).view(np.float32)


class Qsgd:
    """`bits` each: a sign and `s = 2^(bits - 1) - 1` levels between 0 and the largest of 512 neighbours.

    `v` becomes `sign(v) scale floor(s |v| / scale + u) / s` with `u` uniform in [0, 1), whose expectation is `v`.
    """

    unbiased = True

    def __init__(self, bits: int):
        self._bits, self._levels, self._per_byte = bits, 2 ** (bits - 1) - 1, 8 // bits

    def size(self, count: int) -> int:
        """Its bits, and a scale per bucket."""
        return 4 * _buckets(count) + -(-count // self._per_byte)

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        """Round at random."""
        buckets = _padded(values)
        scale = np.abs(buckets).max(axis=1)
        fine = np.abs(buckets) / np.where(scale > 0, scale, 1)[:, None] * np.float32(self._levels)
        level = np.floor(fine + rng.random(buckets.shape, dtype=np.float32))
        level = np.minimum(level, self._levels)  # rounding may have taken the largest a hair above
        signed = np.where(buckets < 0, -level, level).reshape(-1)[: len(values)] + self._levels
        return np.concatenate([scale.astype(np.float32).view(np.uint8), self._pack(signed.astype(np.uint8))])

    def decode(self, code: Array, count: int) -> Array:
        """Levels times scale."""
        split = 4 * _buckets(count)
        scale = np.ascontiguousarray(code[:split]).view(np.float32)
        level = self._unpack(code[split:], count).astype(np.float32) - np.float32(self._levels)
        values: Array = (_padded(level) * (scale / np.float32(self._levels))[:, None]).reshape(-1)[:count]
        return values

    def _pack(self, level: Array) -> Array:
        rows = np.zeros((-(-len(level) // self._per_byte), self._per_byte), np.uint8)
        rows.reshape(-1)[: len(level)] = level
        packed = np.zeros(len(rows), np.uint8)
        for k in range(self._per_byte):
            packed |= rows[:, k] << np.uint8(k * self._bits)
        return packed

    def _unpack(self, packed: Array, count: int) -> Array:
        shifts = np.arange(self._per_byte, dtype=np.uint8) * np.uint8(self._bits)
        rows: Array = (packed[:, None] >> shifts) & np.uint8(2**self._bits - 1)
        return rows.reshape(-1)[:count]


class Sign:
    """One bit each, and the mean size of 512 neighbours (Seide et al. 2014, Karimireddy et al. 2019)."""

    unbiased = False

    def size(self, count: int) -> int:
        """A bit each, and a scale per bucket."""
        return 4 * _buckets(count) + -(-count // 8)

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        """Signs and scales."""
        many = np.minimum(_BUCKET, len(values) - _BUCKET * np.arange(_buckets(len(values))))
        scale = np.abs(_padded(values)).sum(axis=1) / many
        return np.concatenate([scale.astype(np.float32).view(np.uint8), np.packbits(values >= 0)])

    def decode(self, code: Array, count: int) -> Array:
        """Signs times scales."""
        split = 4 * _buckets(count)
        scale = np.ascontiguousarray(code[:split]).view(np.float32)
        sign = np.unpackbits(code[split:], count=count).astype(np.float32) * 2 - 1
        return (_padded(sign) * scale[:, None]).reshape(-1)[:count]


class TopK:
    """The largest `share` of the numbers, written by another codec, and where they belong."""

    unbiased = False

    def __init__(self, share: float, values: Codec):
        self._share, self._values = share, values

    def size(self, count: int) -> int:
        """Place and number of each."""
        k = self._kept(count)
        return k * _place(count).itemsize + self._values.size(k)

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        """Pick them."""
        k = self._kept(len(values))
        chosen = np.sort(np.argpartition(np.abs(values), len(values) - k)[len(values) - k :])
        places = chosen.astype(_place(len(values))).view(np.uint8)
        return np.concatenate([places, self._values.encode(values[chosen], rng)])

    def decode(self, code: Array, count: int) -> Array:
        """Zeros elsewhere."""
        k, kind = self._kept(count), _place(count)
        split = k * kind.itemsize
        places = np.ascontiguousarray(code[:split]).view(kind)
        values = np.zeros(count, np.float32)
        values[places] = self._values.decode(np.ascontiguousarray(code[split:]), k)
        return values

    def _kept(self, count: int) -> int:
        return min(count, max(1, round(self._share * count)))


def _buckets(count: int) -> int:
    return -(-count // _BUCKET)


def _padded(values: Array) -> Array:
    """Rows of a bucket each, with zeros at the end."""
    rows = np.zeros((_buckets(len(values)), _BUCKET), np.float32)
    rows.reshape(-1)[: len(values)] = values
    return rows


def _place(count: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16) if count <= 1 << 16 else np.dtype(np.uint32)
