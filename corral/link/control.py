"""The meta of control messages, with types that are checked on reading."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from corral.link.message import BadMessage, printable
from corral.link.protocol import MAJOR, MINOR, Limits

Versions = list[tuple[int, int]]
OURS: Versions = [(MAJOR, MINOR)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Knock(msgspec.Struct, frozen=True):
    """First message of a learner that connected, with the session it would resume."""

    versions: Versions = msgspec.field(default_factory=lambda: list(OURS))
    role: str = "learner"
    session: _U32 = 0


class Hello(msgspec.Struct, frozen=True):
    """A simulator's description of itself."""

    versions: Versions
    sdk: _Text
    env: _Text
    env_version: int
    instance: _Nonce
    nonce: _Nonce
    session: _U32
    observation: dict[str, Any]
    action: dict[str, Any]
    players: Annotated[int, msgspec.Meta(ge=1, le=64)]
    slots: Annotated[int, msgspec.Meta(ge=1)]
    threads: Annotated[int, msgspec.Meta(ge=1)]
    level: Annotated[int, msgspec.Meta(ge=0, le=4)]
    exact: bool
    capabilities: list[_Text]

    def __post_init__(self) -> None:
        for name in ("sdk", "env"):
            msgspec.structs.force_setattr(self, name, printable(getattr(self, name)))


class Budget(msgspec.Struct, frozen=True):
    """Limits on a session's snapshots."""

    bytes: _Count = 1 << 30
    count: _Count = 1_000_000


class Welcome(msgspec.Struct, frozen=True):
    """A learner accepts a simulator."""

    version: tuple[int, int]
    session: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]
    resumed: bool
    nonce: _Nonce
    proof: bytes
    window: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    limits: Limits
    snapshots: Budget


class Ready(msgspec.Struct, frozen=True):
    """A simulator is ready for requests."""

    proof: bytes


T = TypeVar("T", bound=msgspec.Struct)


def to_meta(control: msgspec.Struct) -> dict[str, Any]:
    """The meta of a message, in the order of the fields."""
    meta: dict[str, Any] = msgspec.to_builtins(control, builtin_types=(bytes,))
    return meta


def from_meta(meta: dict[str, Any] | None, kind: type[T]) -> T:
    """Read a meta as `kind`; a BadMessage names the invalid field."""
    try:
        return msgspec.convert(meta or {}, kind)
    except msgspec.ValidationError as error:
        raise BadMessage(f"a {kind.__name__.upper()} with {error}") from error
