"""Gradient compression: `topk:0.01`, `qsgd:8`, `sign`, `fp16`, `bf16`, `powersgd:2`, `topk:0.01+qsgd:8`.

A codec encodes a float32 vector in a number of bytes that depends only on its length. `qsgd` (Alistarh et al. 2017) is
unbiased; for the others, `Compression` feeds the error back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from corral.core.errors import UserError
from corral.core.types import Array
from corral.learn.exchange.config import DataParallelConfig

_BUCKET = 512  # numbers that share a scale: one large gradient does not coarsen all others


class Codec(Protocol):
    """Encodes vectors as bytes and decodes them."""

    unbiased: bool
    """Whether the expectation of the decoded vector is the vector itself."""

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        """The bytes as uint8. The values are finite float32."""

    def decode(self, code: Array, count: int) -> Array:
        """`count` float32 numbers."""


class Float32Codec:
    """Uncompressed float32."""

    unbiased = True

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        return np.array(values, np.float32).view(np.uint8)  # a copy: the source may change before it is sent

    def decode(self, code: Array, count: int) -> Array:
        return code.view(np.float32)


class HalfCodec:
    """The nearest number of a 16-bit type; larger values are clipped to its maximum."""

    unbiased = False

    def __init__(self, dtype: torch.dtype):
        self._dtype, self._largest = dtype, torch.finfo(dtype).max

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        clipped = torch.from_numpy(np.ascontiguousarray(values)).clamp(-self._largest, self._largest)
        rounded: Array = clipped.to(self._dtype).view(torch.int16).numpy()
        return rounded.view(np.uint8)  # torch cannot view an empty tensor as bytes

    def decode(self, code: Array, count: int) -> Array:
        values: Array = torch.from_numpy(code.view(np.int16)).view(self._dtype).float().numpy()
        return values


class Qsgd:
    """`bits` per number: a sign and `s = 2^(bits - 1) - 1` levels between 0 and the maximum of 512 neighbours.

    `v` becomes `sign(v) scale floor(s |v| / scale + u) / s` with `u` uniform in [0, 1), whose expectation is `v`.
    """

    unbiased = True

    def __init__(self, bits: int):
        self._bits, self._levels, self._per_byte = bits, 2 ** (bits - 1) - 1, 8 // bits

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        buckets = _padded(values)
        scale = np.abs(buckets).max(axis=1)
        fine = np.abs(buckets) / np.where(scale > 0, scale, 1)[:, None] * np.float32(self._levels)
        level = np.floor(fine + rng.random(buckets.shape, dtype=np.float32))
        level = np.minimum(level, self._levels)  # rounding may put the maximum slightly above
        signed = np.where(buckets < 0, -level, level).reshape(-1)[: len(values)] + self._levels
        return np.concatenate([scale.astype(np.float32).view(np.uint8), self._pack(signed.astype(np.uint8))])

    def decode(self, code: Array, count: int) -> Array:
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
    """One bit per number, and the mean magnitude of 512 neighbours (Seide et al. 2014, Karimireddy et al. 2019)."""

    unbiased = False

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        many = np.minimum(_BUCKET, len(values) - _BUCKET * np.arange(_buckets(len(values))))
        scale = np.abs(_padded(values)).sum(axis=1) / many
        return np.concatenate([scale.astype(np.float32).view(np.uint8), np.packbits(values >= 0)])

    def decode(self, code: Array, count: int) -> Array:
        split = 4 * _buckets(count)
        scale = np.ascontiguousarray(code[:split]).view(np.float32)
        sign = np.unpackbits(code[split:], count=count).astype(np.float32) * 2 - 1
        return (_padded(sign) * scale[:, None]).reshape(-1)[:count]


class TopK:
    """The largest fraction `share` of the numbers, encoded by another codec, with their indices."""

    unbiased = False

    def __init__(self, share: float, values: Codec):
        self._share, self._values = share, values

    def encode(self, values: Array, rng: np.random.Generator) -> Array:
        k = self._kept(len(values))
        chosen = np.sort(np.argpartition(np.abs(values), len(values) - k)[len(values) - k :])
        places = chosen.astype(_place(len(values))).view(np.uint8)
        return np.concatenate([places, self._values.encode(values[chosen], rng)])

    def decode(self, code: Array, count: int) -> Array:
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
    """Rows of one bucket each, zero-padded."""
    rows = np.zeros((_buckets(len(values)), _BUCKET), np.float32)
    rows.reshape(-1)[: len(values)] = values
    return rows


def _place(count: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16) if count <= 1 << 16 else np.dtype(np.uint32)


_CODECS: dict[str, Codec] = {
    "fp16": HalfCodec(torch.float16),
    "bf16": HalfCodec(torch.bfloat16),
    "sign": Sign(),
    **{f"qsgd:{bits}": Qsgd(bits) for bits in (2, 4, 8)},
}


@dataclass(frozen=True)
class Compress:
    """A compression by name: a codec, or one of torch's communication hooks."""

    codec: Codec
    hook: str | None = None
    """The communication hook of `DistributedDataParallel`, which all-reduce prefers: fp16, bf16 or powersgd."""
    rank: int = 0


def find_compression(name: str) -> Compress | None:
    """None for `none`; UserError with the valid names for an unknown name."""
    if name == "none":
        return None
    kind, _, rest = name.partition(":")
    if kind == "powersgd":
        rank = _number(name, rest or "1", 1, 64)
        if rank != int(rank):
            raise UserError(f"compress={name}: the rank must be an integer, such as powersgd:{round(rank)}.")
        return Compress(Float32Codec(), "powersgd", int(rank))
    if kind == "topk":
        share, plus, values = rest.partition("+")
        inner = _codec(name, values) if plus else Float32Codec()
        return Compress(TopK(_number(name, share, 1e-6, 1.0), inner))
    return Compress(_codec(name, name), name if name in ("fp16", "bf16") else None)


def _codec(name: str, part: str) -> Codec:
    if part not in _CODECS:
        raise _unknown(name)
    return _CODECS[part]


def _number(name: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _unknown(name) from None
    if not least <= value <= most:
        raise UserError(f"compress={name}: {text} must be between {least:g} and {most:g}.")
    return value


def _unknown(name: str) -> UserError:
    return UserError(
        f"compress={name} is unknown: use none, fp16, bf16, powersgd:RANK, sign, qsgd:BITS with 2, 4 or 8 bits, "
        "topk:SHARE, or topk:SHARE+CODEC with one of fp16, bf16, sign, qsgd:BITS."
    )


class Compression:
    """Encodes one learner's gradients, with error feedback, as codes of constant size.

    Error feedback (Seide et al. 2014): `e <- e + g`, send `C(e)`, `e <- e - C(e)`. With momentum correction (Lin et al.
    2018) velocities are accumulated instead of gradients: `u <- m u + g`, `e <- e + u`; `u` is reset where something
    was sent, so that delayed values do not keep an outdated direction.
    """

    def __init__(self, codec: Codec, count: int, seed: int, *, feedback: bool, momentum: float = 0.0):
        self._codec, self.count, self._feedback, self._momentum = codec, count, feedback, momentum
        self._rng = np.random.default_rng(seed)
        self._left = np.zeros(count if feedback else 0, np.float32)
        self._velocity = np.zeros(count if momentum else 0, np.float32)
        self._ended = self._velocity  # velocities reset by the last code
        self._before = self._left, self._velocity  # the last `pack`

    def blank(self) -> Array:
        """A code of the usual size, for a message whose code is not read."""
        return self._codec.encode(np.zeros(self.count, np.float32), np.random.default_rng(0))

    def pack(self, grad: Array) -> Array:
        """Encode a finite gradient together with the error left from earlier ones."""
        if not self._feedback:
            return self._codec.encode(grad, self._rng)
        self._before = self._left.copy(), self._velocity.copy()
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
        return self._codec.decode(code, self.count)

    def undo_pack(self, code: Array) -> None:
        """Undo the last `pack`: no update used this code, so it is sent again with the next one."""
        if self._feedback:
            self._left += self.unpack(code)
        if self._momentum:
            self._velocity += self._ended

    def discard_pack(self) -> None:
        """Undo the last `pack` and forget its gradient: without compression it would not be used later either."""
        self._left, self._velocity = self._before


def gradient_codec(config: DataParallelConfig) -> Codec:
    """The codec of gradients."""
    compress = find_compression(config.compress)
    return Float32Codec() if compress is None else compress.codec


def broadcast_codec(config: DataParallelConfig) -> Codec:
    """The codec of weights."""
    return Qsgd(8) if config.quantize_weights else Float32Codec()


def make_compression(config: DataParallelConfig, count: int, seed: int) -> Compression:
    """The compression of `count` gradients of one learner; errors of biased codecs are fed back."""
    codec = gradient_codec(config)
    return Compression(codec, count, seed, feedback=not codec.unbiased, momentum=config.compress_momentum)
