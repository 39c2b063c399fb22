"""Messages between a state server and its clients: those of the link (docs/link.md, section 9)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from corral.link.control import OURS, Versions

CLIENT, SERVER = b"corral-client", b"corral-states"
MOST_BYTES = 256 << 20
_Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class ClientKnock(msgspec.Struct, frozen=True):
    """A client says what it wants."""

    versions: Versions
    role: str
    nonce: _Nonce


class ServerWelcome(msgspec.Struct, frozen=True):
    """The server proves itself, and says how large a state may be."""

    version: tuple[int, int]
    nonce: _Nonce
    proof: bytes
    most_bytes: int


class Dropped(msgspec.Struct, frozen=True):
    """Whether there was a state to drop."""

    dropped: bool


class Page(msgspec.Struct, frozen=True):
    """Some names, in order, and whether there are more."""

    names: list[str]
    more: bool


class Held(msgspec.Struct, frozen=True):
    """What the server holds."""

    snapshots: int
    snapshot_bytes: int


def knock(nonce: bytes) -> ClientKnock:
    """The first message of a client."""
    return ClientKnock(list(OURS), "states", nonce)
