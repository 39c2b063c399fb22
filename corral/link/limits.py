"""What a session may cost: sizes that both sides enforce."""

from __future__ import annotations

from typing import Annotated

import msgspec

_MESSAGE, _MOST_MESSAGE = 64 << 20, 1 << 30
_REPLIES = 256 << 20  # that a simulator keeps
_WINDOW = 16


class Limits(msgspec.Struct, frozen=True):
    """Limits of a session, as WELCOME names them."""

    message: Annotated[int, msgspec.Meta(ge=4096)] = _MESSAGE
    batch: Annotated[int, msgspec.Meta(ge=1)] = 4096
    slots: Annotated[int, msgspec.Meta(ge=1)] = 65536
    meta: Annotated[int, msgspec.Meta(ge=256)] = 1 << 20
    info: Annotated[int, msgspec.Meta(ge=0)] = 4096


def choose_limits(row_bytes: int) -> tuple[Limits, int]:
    """Limits and window for rows whose observation, its last one included, takes so many bytes on the wire."""
    two_rows = 2 * row_bytes + (1 << 20)
    message = min(max(_MESSAGE, two_rows), _MOST_MESSAGE)
    window = max(2, min(_WINDOW, _REPLIES // max(1, row_bytes)))
    return Limits(message=message), window


def rows_per_message(limits: Limits, row_bytes: int) -> int:
    """How many rows a request may have so that neither it nor its reply is too large."""
    return max(1, min(limits.batch, (limits.message - (1 << 19)) // max(1, row_bytes)))
