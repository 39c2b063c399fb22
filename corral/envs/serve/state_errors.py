"""States on the wire: exported states as bytes, and the status of a row whose state could not be served."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from corral.core.encoding import DecodeError, decode, encode
from corral.link import protocol as clp
from corral.snapshot.env_states import EnvStates
from corral.snapshot.keeper import CannotSave
from corral.snapshot.scratch_env import KeptState, NotFinite
from corral.snapshot.states import EpisodeEnded, StatesFull, UnknownState

_HEAD = struct.Struct("<4sII")  # of an exported state: magic, layout of the spaces, CRC-32 of the rest
_MAGIC = b"CPY1"
Problem = tuple[clp.Status, str]  # status and message of a row


class BadRequest(Exception):
    """A request that cannot be served, detected before anything has changed."""

    def __init__(self, text: str, status: clp.Status = clp.Status.E_BAD_REQUEST):
        super().__init__(text)
        self.status = status


def pack_state(layout: int, state: KeptState) -> bytes:
    """Pack a kept state and its last observation as bytes, with the layout of its environment."""
    body = b"".join(encode([state.kept, state.over, state.obs]))
    return _HEAD.pack(_MAGIC, layout, zlib.crc32(body)) + body


def unpack_state(layout: int, states: EnvStates, key: int, blob: bytes) -> None:
    """Keep a state packed by `pack_state`, here or elsewhere; BadRequest when it is invalid."""
    if len(blob) < _HEAD.size:
        raise BadRequest("too few bytes for a state")
    magic, theirs, crc = _HEAD.unpack_from(blob)
    body = blob[_HEAD.size :]
    if magic != _MAGIC or theirs != layout:
        raise BadRequest("a state of another environment")
    if zlib.crc32(body) != crc:
        raise BadRequest("a damaged state")
    try:
        kept, over, obs = decode(body)
        states.put_exported(key, kept, [np.array(leaf) for leaf in obs], bool(over))
    except (DecodeError, ValueError, TypeError, CannotSave) as error:
        raise BadRequest(f"not a state of this environment ({error})") from error


def require_id(key: int) -> None:
    """BadRequest for id 0, which stands for no state."""
    if key == 0:
        raise BadRequest("state 0 cannot be kept")


def problems_of(do: Callable[..., None], *columns: Iterable[Any]) -> dict[int, Problem | None]:
    """Run an operation on the values of each row; returns status and message of its error, if any."""
    return {row: _problem(do, *values) for row, values in enumerate(zip(*columns, strict=True))}


def _problem(do: Callable[..., None], *args: Any) -> Problem | None:
    try:
        do(*args)
    except BadRequest as error:
        return error.status, str(error)
    except UnknownState as error:
        return clp.Status.E_UNKNOWN_STATE, str(error)
    except EpisodeEnded as error:
        return clp.Status.E_NO_EPISODE, str(error)
    except StatesFull as error:
        return clp.Status.E_SNAPSHOT_FULL, f"{error}; drop some"
    except CannotSave as error:
        return clp.Status.E_UNSUPPORTED, str(error)
    return None


def failure_of(error: Exception) -> Problem:
    """Status of a step that failed."""
    if isinstance(error, NotFinite):
        return clp.Status.E_NOT_FINITE, str(error)
    return clp.Status.E_ENV, f"step() raised {error!r}"
