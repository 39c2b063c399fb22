"""`StateStore` on a `corral state-server`, and the messages between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from corral.core.encoding import Buffer
from corral.core.errors import EnvFailed, UserError
from corral.link import protocol as clp
from corral.link.address import parse_url
from corral.link.auth import is_proven, new_nonce, prove, read_token
from corral.link.control import OURS, Ready, T, Versions, from_meta, to_meta
from corral.link.message import BadMessage, Message, read_message
from corral.link.transports.base import Wire
from corral.link.transports.open import open_binding
from corral.snapshot.states import StatesFull
from corral.snapshot.store.base import StateStore, check_name

CLIENT, SERVER = b"corral-client", b"corral-states"
MAX_BYTES = 256 << 20
_Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class ClientKnock(msgspec.Struct, frozen=True):
    """The first message of a client."""

    versions: Versions
    role: str
    nonce: _Nonce


class ServerWelcome(msgspec.Struct, frozen=True):
    """The server proves its identity, and announces the maximum size of a state."""

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
    """Make the first message of a client."""
    return ClientKnock(list(OURS), "states", nonce)


class RemoteStates(StateStore):
    """A connection to a state server; after a disconnect it reconnects and repeats the request in flight."""

    def __init__(self, url: str, token_file: str | None = None, timeout_s: float = 30.0):
        address = parse_url(url)
        if address.listen_only:
            raise UserError(f"{url} cannot be connected to: name the state server's host and port.")
        self._url, self._token, self._timeout_s = url, read_token(token_file), timeout_s
        self._binding = open_binding(address.scheme, connect=[address])
        self._wire: Wire | None = None
        self._nonce, self._ready = b"", False
        self._seq = 0

    def put(self, name: str, state: bytes) -> None:
        if len(state) > MAX_BYTES:
            raise UserError(f"The state has {len(state)} bytes; a state server accepts at most {MAX_BYTES}.")
        self._ask(clp.Op.PUT, {"name": check_name(name)}, [state])

    def get(self, name: str) -> bytes | None:
        reply = self._ask(clp.Op.GET, {"name": check_name(name)})
        if reply.status == clp.Status.E_UNKNOWN_STATE:
            return None
        if len(reply.payload) != 1:
            raise EnvFailed(f"The state server at {self._url} answered GET with {len(reply.payload)} frames.")
        return bytes(reply.payload[0])

    def drop(self, name: str) -> bool:
        return self._read(self._ask(clp.Op.DROP_STATE, {"name": check_name(name)}), Dropped).dropped

    def names(self, prefix: str = "") -> list[str]:
        found: list[str] = []
        while True:
            meta = {"prefix": prefix, "after": found[-1] if found else ""}
            page = self._read(self._ask(clp.Op.LIST, meta), Page)
            if found and page.names and page.names[0] <= found[-1]:  # otherwise this would never end
                raise EnvFailed(f"The state server at {self._url} lists names that it was not asked for.")
            found += page.names
            if not page.more or not page.names:
                return found

    @property
    def nbytes(self) -> int:
        return self._read(self._ask(clp.Op.STATS, {}), Held).snapshot_bytes

    def close(self) -> None:
        self._binding.close()

    def _ask(self, op: int, meta: dict[str, Any], payload: Sequence[Buffer] = ()) -> Message:
        """Send until there is a reply: requests may be repeated."""
        self._seq += 1
        message = Message(op, seq=self._seq, meta=meta, payload=list(payload))
        until, sent = time.monotonic() + self._timeout_s, None
        while time.monotonic() < until:
            if self._ready and sent is not self._wire and self._wire is not None:
                self._wire.send(message.frames())
                sent = self._wire
            for event in self._binding.poll(0.25):
                if event.lost is not None:
                    if event.wire is self._wire:
                        self._wire, self._ready = None, False
                elif event.frames is None:
                    self._knock(event.wire)
                elif (reply := self._take(event.wire, event.frames)) is not None and reply.seq == self._seq:
                    return self._checked(reply)
        raise EnvFailed(f"The state server at {self._url} did not answer within {self._timeout_s:g} s; is it running?")

    def _read(self, reply: Message, kind: type[T]) -> T:
        try:
            return from_meta(reply.meta, kind)
        except BadMessage as error:
            raise EnvFailed(f"The state server at {self._url} answered with {error}.") from error

    def _knock(self, wire: Wire) -> None:
        self._wire, self._ready, self._nonce = wire, False, new_nonce()
        wire.send(Message(clp.Op.KNOCK, meta=to_meta(knock(self._nonce))).frames())

    def _take(self, wire: Wire, frames: Sequence[Buffer]) -> Message | None:
        try:
            message = read_message(frames)
            if message.op == clp.Op.ERROR:
                raise UserError(f"The state server at {self._url} refused: {message.text}.")
            if self._ready:
                return message
            welcome = from_meta(message.meta, ServerWelcome)
        except BadMessage as error:
            raise EnvFailed(f"{self._url} is not a state server: it sent {error}.") from error
        if not is_proven(self._token, welcome.proof, SERVER, self._nonce, welcome.nonce):
            raise UserError(f"The server at {self._url} did not prove that it knows the token; give it the same file.")
        wire.max_bytes = MAX_BYTES + clp.GREETING_BYTES
        proof = prove(self._token, CLIENT, self._nonce, welcome.nonce)
        wire.send(Message(clp.Op.READY, meta=to_meta(Ready(proof))).frames())
        self._ready = True
        return None

    def _checked(self, reply: Message) -> Message:
        if not reply.flags & clp.FAILED:
            return reply
        if reply.status == clp.Status.E_SNAPSHOT_FULL:
            raise StatesFull(reply.text)
        raise UserError(f"The state server refused: {reply.text}")
