"""Compression by name: `topk:0.01`, `qsgd:8`, `sign`, `fp16`, `bf16`, `powersgd:2`, `topk:0.01+qsgd:8`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from corral.core.errors import UserError
from corral.core.types import Array
from corral.learn.exchange.config import DataParallelConfig

# Ways to write a vector of float32 in fewer bytes. How many depends only on its length. `qsgd` (Alistarh et al. 2017)
# is right in expectation. The others are off by what they leave out, which `corral.learn.exchange.compress` makes up
# for.


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


Hook = Literal["fp16", "bf16", "powersgd"]
_BITS = (2, 4, 8)


@dataclass(frozen=True)
class Compress:
    """What a name stands for: a codec, or one of torch's own ways to reduce gradients in fewer bytes."""

    name: str
    codec: Codec
    hook: Hook | None = None
    """How `DistributedDataParallel` would do it, which an all-reduction prefers."""
    rank: int = 0


def find_compression(name: str) -> Compress | None:
    """None for `none`; UserError, with what there is, for a name that says nothing."""
    if name == "none":
        return None
    if name in ("fp16", "bf16"):
        return Compress(name, _codec(name, name), "fp16" if name == "fp16" else "bf16")
    kind, _, rest = name.partition(":")
    if kind == "powersgd":
        return Compress(name, Whole(), "powersgd", _rank(name, rest or "1"))
    if kind == "topk":
        share, plus, values = rest.partition("+")
        inner: Codec = _codec(name, values) if plus else Whole()
        return Compress(name, TopK(_number(name, share, 1e-6, 1.0), inner))
    return Compress(name, _codec(name, name))


def _codec(name: str, part: str) -> Codec:
    kind, _, rest = part.partition(":")
    if part == "fp16":
        return Half()
    if part == "bf16":
        return Brain()
    if part == "sign":
        return Sign()
    if kind == "qsgd" and rest in map(str, _BITS):
        return Qsgd(int(rest))
    raise _unknown(name)


def _number(name: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _unknown(name) from None
    if not least <= value <= most:
        raise UserError(f"compress={name}: {text} must be between {least:g} and {most:g}.")
    return value


def _rank(name: str, text: str) -> int:
    rank = _number(name, text, 1, 64)
    if rank != int(rank):
        raise UserError(f"compress={name}: a rank is a whole number, such as powersgd:{round(rank)}.")
    return int(rank)


def _unknown(name: str) -> UserError:
    return UserError(
        f"compress={name} says nothing: there are none, fp16, bf16, powersgd:RANK, sign, qsgd:BITS of 2, 4 or 8, "
        "topk:SHARE, and topk:SHARE+qsgd:BITS or another of these."
    )


# What a codec leaves out is not lost: it is added to the next gradient. Error feedback (Seide et al. 2014): `e <- e +
# g`, send `C(e)`, `e <- e - C(e)`. With momentum correction (Lin et al. 2018) velocities are gathered instead of
# gradients: `u <- m u + g`, `e <- e + u`, and where something was sent `u` starts anew, so that what waits does not
# push on with a direction of long ago.


class Compression:
    """One learner's gradients, as codes of the same size each."""

    def __init__(self, codec: Codec, count: int, seed: int, *, feedback: bool, momentum: float = 0.0):
        self._codec, self.count, self._feedback, self._momentum = codec, count, feedback, momentum
        self._rng = np.random.default_rng(seed)
        self._left = np.zeros(count if feedback else 0, np.float32)
        self._velocity = np.zeros(count if momentum else 0, np.float32)
        self._ended = self._velocity  # velocities that ended with the last code

    @property
    def size(self) -> int:
        """Bytes of a code."""
        return self._codec.size(self.count)

    def pack(self, grad: Array) -> Array:
        """The code of a finite gradient, and of what was left of earlier ones."""
        if not self._feedback:
            return self._codec.encode(grad, self._rng)
        if self._momentum:
            self._velocity *= np.float32(self._momentum)
            self._velocity += grad
            grad = self._velocity
        self._left += grad
        code = self._codec.encode(self._left, self._rng)
        sent = self._codec.decode(code, self.count)
        self._left -= sent
        if self._momentum:
            self._ended = np.where(sent != 0, self._velocity, np.float32(0.0))
            self._velocity -= self._ended
        return code

    def unpack(self, code: Array) -> Array:
        """The gradient that anybody's code stands for."""
        return self._codec.decode(code, self.count)

    def put_back(self, code: Array) -> None:
        """No update was made with this code, the last of ours: send it again with the next."""
        if self._feedback:
            self._left += self.unpack(code)
        if self._momentum:
            self._velocity += self._ended


def gradient_codec(config: DataParallelConfig) -> Codec:
    """How gradients are encoded."""
    compress = find_compression(config.compress)
    return Whole() if compress is None else compress.codec


def broadcast_codec(config: DataParallelConfig) -> Codec:
    """How weights are encoded."""
    return Qsgd(8) if config.quantize_weights else Whole()


def uses_feedback(config: DataParallelConfig) -> bool:
    """Whether what a compression leaves out is added to the next gradient: where it is biased, or torch's hook does."""
    compress = find_compression(config.compress)
    return compress is not None and (compress.hook is not None or not compress.codec.unbiased)
