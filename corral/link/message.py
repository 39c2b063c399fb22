"""One message of the link: header, meta and payload, read from and written to frames, with every size checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from corral.core.encoding import Buffer
from corral.link import protocol as clp

_encode_meta = msgspec.msgpack.Encoder().encode
_META_BYTES = 1 << 20
_DEPTH = 16
_OPS = frozenset(int(op) for op in clp.Op)


class BadMessage(Exception):
    """Frames that are not a valid message; the text gives the reason."""


@dataclass(slots=True)
class Message:
    """Header fields, the meta if there is one, and the payload, whose frames are views of what was received."""

    op: int
    flags: int = 0
    status: int = 0
    seq: int = 0
    session: int = 0
    layout: int = 0
    batch: int = 0
    aux: int = 0
    meta: dict[str, Any] | None = None
    payload: Sequence[Buffer] = field(default_factory=list)

    def frames(self) -> list[Buffer]:
        """The frames to send; the payload is not copied."""
        flags = self.flags if self.meta is None else self.flags | clp.META
        head = clp.HEADER.pack(
            clp.MAGIC, clp.MAJOR, self.op, flags, self.status, self.seq, self.session, self.layout, self.batch, self.aux
        )
        if self.meta is None:
            return [head, *self.payload]
        return [head, _encode_meta(self.meta), *self.payload]

    @property
    def text(self) -> str:
        text = (self.meta or {}).get("text", "")
        return printable(" ".join(text.split())[:500]) if isinstance(text, str) else ""


def printable(text: str, *, lines: bool = False) -> str:
    """A peer's text for messages: control characters would forge lines of a log, or steer a terminal.

    With `lines`, line breaks are kept, and what follows them is indented.
    """
    shown = "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else "?" for c in text)
    return shown.replace("\n", "\n    " if lines else "?")


def read_message(frames: Sequence[Buffer]) -> Message:
    """Read a message from frames; BadMessage when they are invalid."""
    if not 1 <= len(frames) <= clp.MAX_FRAMES:
        raise BadMessage(f"{len(frames)} frames, expected 1 to {clp.MAX_FRAMES}")
    head = frames[0]
    if len(head) != clp.HEADER.size:
        raise BadMessage(f"a header of {len(head)} bytes, expected {clp.HEADER.size}")
    magic, major, op, flags, status, seq, session, layout, batch, aux = clp.HEADER.unpack(head)
    if magic != clp.MAGIC:
        raise BadMessage(f"magic {bytes(magic)!r}, expected {clp.MAGIC!r}")
    if major != clp.MAJOR:
        raise BadMessage(f"version {major} of the protocol, expected {clp.MAJOR}")
    if op not in _OPS:
        raise BadMessage(f"unknown op {op}")
    if flags & ~clp.ALL_FLAGS:
        raise BadMessage(f"unknown flags {flags:#x}")
    if not flags & clp.META:
        return Message(op, flags, status, seq, session, layout, batch, aux, None, frames[1:])
    if len(frames) < 2:
        raise BadMessage("the meta frame is missing")
    meta = read_meta(frames[1])
    return Message(op, flags, status, seq, session, layout, batch, aux, meta, frames[2:])


def read_meta(frame: Buffer) -> dict[str, Any]:
    """Read a meta frame; BadMessage when it is not a map with text keys, or too large, or too deep."""
    if len(frame) > _META_BYTES:
        raise BadMessage(f"a meta frame of {len(frame)} bytes, at most {_META_BYTES} are accepted")
    try:
        meta = msgspec.msgpack.decode(frame, type=dict[str, Any], strict=True)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise BadMessage(f"a meta frame that cannot be read ({error})") from error
    if not _is_plain(meta, _DEPTH):
        raise BadMessage(f"a meta frame nested more than {_DEPTH} deep, or with values that are not plain")
    return meta


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and _is_plain(item, depth - 1) for key, item in value.items())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return value is None or isinstance(value, bool | int | float | str | bytes)
