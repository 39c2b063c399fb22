"""Numbers of the protocol CLP/1, explained in docs/link.md, and the size limits that both sides enforce."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Annotated

import msgspec

MAGIC, MAJOR, MINOR = b"CL", 1, 0
HEADER = struct.Struct("<2sBBHHQIIII")
MAX_FRAMES = 8
GREETING_BYTES = 1 << 20  # of a message before READY
GENERATION_BITS = 40  # of an id, below its generation
GENERATIONS = 1 << 24


class Op(IntEnum):
    """Message types."""

    KNOCK, HELLO, WELCOME, READY = 1, 2, 3, 4
    RESET, STEP, SAVE, LOAD, EXPAND, ROLLOUT, DROP, EXPORT, IMPORT = range(16, 25)
    HEARTBEAT, STATS, LOG, CLOSE, ERROR = range(32, 37)
    PUT, GET, DROP_STATE, LIST = range(48, 52)


# Flags of a header.
REPLY, FAILED, META, WANT_OBS, AUTORESET, NO_REPLY = 1, 2, 4, 8, 16, 32
ALL_FLAGS = 63

# Flags of a row.
TERMINATED, TRUNCATED, FAULTY, FIRST, LIFE = 1, 2, 4, 8, 16


class Status(IntEnum):
    """Outcome of a row, a request or a session."""

    OK = 0
    E_BAD_REQUEST, E_UNSUPPORTED, E_TOO_LARGE, E_UNKNOWN_STATE, E_DEADLINE = 1, 2, 3, 4, 5
    E_SNAPSHOT_FULL, E_ENV, E_NOT_FINITE, E_NO_EPISODE = 6, 7, 8, 9
    E_VERSION, E_AUTH, E_SPACE_MISMATCH, E_PROTOCOL, E_FULL, E_SESSION = range(32, 38)


def status_name(status: int) -> str:
    """Name of a status, known or not."""
    return Status(status).name if status in Status._value2member_map_ else f"status {status}"


_MESSAGE, _MAX_MESSAGE = 64 << 20, 1 << 30
_REPLIES = 256 << 20  # replies that a simulator keeps
_WINDOW = 16


class Limits(msgspec.Struct, frozen=True):
    """Limits of a session, sent in WELCOME."""

    message: Annotated[int, msgspec.Meta(ge=4096)] = _MESSAGE
    batch: Annotated[int, msgspec.Meta(ge=1)] = 4096
    slots: Annotated[int, msgspec.Meta(ge=1)] = 65536
    meta: Annotated[int, msgspec.Meta(ge=256)] = 1 << 20
    info: Annotated[int, msgspec.Meta(ge=0)] = 4096


def choose_limits(row_bytes: int) -> tuple[Limits, int]:
    """Limits and window for rows whose observations, the final one included, take this many bytes on the wire."""
    two_rows = 2 * row_bytes + (1 << 20)
    message = min(max(_MESSAGE, two_rows), _MAX_MESSAGE)
    window = max(2, min(_WINDOW, _REPLIES // max(1, row_bytes)))
    return Limits(message=message), window


def rows_per_message(limits: Limits, row_bytes: int) -> int:
    """Largest number of rows per request for which neither it nor its reply is too large."""
    return max(1, min(limits.batch, (limits.message - (1 << 19)) // max(1, row_bytes)))
