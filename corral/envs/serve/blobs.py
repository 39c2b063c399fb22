"""Exported states of Python environments: bytes that know what they are a state of."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from corral.core.encoding import BadMessage, decode, encode
from corral.envs.serve.states import State, States
from corral.link import protocol as clp
from corral.snapshot.keeper import CannotKeep

_HEAD = struct.Struct("<4sII")  # magic, layout of the spaces, CRC-32 of the rest
_MAGIC = b"CPY1"


def pack_state(layout: int, state: State) -> bytes:
    """A state that is kept as bytes, with its last observation."""
    body = b"".join(encode([state.kept, state.over, state.obs]))
    return _HEAD.pack(_MAGIC, layout, zlib.crc32(body)) + body


def unpack_state(layout: int, states: States, key: int, blob: bytes) -> tuple[int, str]:
    """Keep a state that `pack_state` packed, here or elsewhere; returns status and words."""
    bad = clp.Status.E_BAD_REQUEST
    if len(blob) < _HEAD.size:
        return bad, "too few bytes for a state"
    magic, theirs, crc = _HEAD.unpack_from(blob)
    body = blob[_HEAD.size :]
    if magic != _MAGIC or theirs != layout:
        return bad, "a state of another environment"
    if zlib.crc32(body) != crc:
        return bad, "a damaged state"
    try:
        kept, over, obs = decode(body)
        leaves = [np.array(leaf) for leaf in obs]
        states.check(kept, leaves)
    except (BadMessage, ValueError, TypeError, CannotKeep) as error:
        return bad, f"not a state of this environment ({error})"
    return states.put(key, kept, leaves, bool(over))
