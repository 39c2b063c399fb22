"""What a gRPC VecEnv and its workers agree on: one call, a stream of messages each way, and how it ends.

A worker dials in, and its metadata say who it is. The first message that it gets is BUILD; then it answers those of
`channel`, as any worker does. A message is a list of a number and a value in the form of `corral.core.encoding`.
The status that the call ends with says why: OK, the run is over; FAILED_PRECONDITION, this worker does not fit;
RESOURCE_EXHAUSTED, no place is free; ABORTED, the learner gave this worker up; anything else, the connection is lost.
"""

from __future__ import annotations

import math
from typing import Any

from corral.core import encoding
from corral.core.errors import UserError
from corral.core.types import Array, EnvSpec
from corral.envs.backends.remote import messages as ch
from corral.envs.stepping.rows import CopiedRows
from corral.link.transports import grpc as rpc

METHOD = "Serve"
SERVICE = "corral.Environments"
VERSION, HOST, PID = "corral-version", "corral-host", "corral-pid"  # keys of the metadata

# Beside those of `channel`: learner to worker
BUILD, LOOK = 20, 21
# both ways: rows
PARCEL = 22
# worker to learner: where it is, in answer to LOOK
SEEN = 23

_PART_BYTES = 1 << 25  # rows travel in messages of about this size, or one by one

_RETRY_MS = 250, 5000  # after which a connection that failed is tried again, at first and at most
OPTIONS = rpc.options(*_RETRY_MS)


def connect(address: str) -> Any:
    """A channel to a learner, which need not be there yet.

    Keep it: with a new one for each call, calls may hang for ever, beyond their deadline (seen with grpcio 1.85).
    """
    return rpc.import_grpc().insecure_channel(check_address(address, "the learner's address"), options=OPTIONS)


def check_address(text: Any, what: str) -> str:
    """The text, if it is HOST:PORT."""
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"{what} must be HOST:PORT, such as 10.0.0.1:5555, got {text!r}.")
    return str(text)


def to_bytes(op: int, data: Any = None) -> bytes:
    """One message; UserError when it is too large."""
    parts = encoding.encode([op, data])
    if (size := encoding.size_of(parts)) > rpc.MAX_BYTES:
        raise UserError(
            f"A message of {size >> 20} MB is more than the {rpc.MAX_BYTES >> 20} MB that gRPC is to carry: make "
            "observations smaller."
        )
    return b"".join(parts)


def from_bytes(data: bytes) -> tuple[int, Any]:
    """What `to_bytes` was given; BadMessage when it is something else."""
    value = encoding.decode(data)
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], int):
        raise encoding.DecodeError("no number and value")
    op, content = value
    return op, CopiedRows(**content) if op in (PARCEL, ch.READY) else content


def parts(spec: EnvSpec, env_ids: Array) -> list[Array]:
    """These environments in groups whose rows fit into a message."""
    size = 2 * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in spec.observation.leaves)
    count = max(1, _PART_BYTES // max(1, size))
    return [env_ids[start : start + count] for start in range(0, len(env_ids), count)]
