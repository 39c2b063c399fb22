"""Compression by name: `topk:0.01`, `qsgd:8`, `sign`, `fp16`, `bf16`, `powersgd:2`, `topk:0.01+qsgd:8`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from corral.core.errors import UserError
from corral.learn.exchange.codecs import Brain, Codec, Half, Qsgd, Sign, TopK, Whole

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
