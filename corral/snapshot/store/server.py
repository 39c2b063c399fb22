"""A server that keeps states for simulators and planners, in Python and C++, on this machine or others."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from corral.core.errors import UserError
from corral.core.log import RateLimitedLog
from corral.link import protocol as clp
from corral.link.auth import is_proven, new_nonce, prove
from corral.link.control import Ready, from_meta, to_meta
from corral.link.message import BadMessage, Message, read_message
from corral.link.transports.base import Binding, Event, Wire
from corral.snapshot.states import StatesFull
from corral.snapshot.store import client as sw
from corral.snapshot.store.base import StateStore

log = logging.getLogger("corral.snapshot")

_GREETING_S = 10.0
_MAX_CLIENTS = 1024


@dataclass
class _Client:
    since: float
    nonce: bytes = b""
    own_nonce: bytes = b""
    ready: bool = False


class StateServer:
    """Answers PUT, GET, DROP_STATE, LIST and STATS one after the other, so all clients see the same."""

    def __init__(self, binding: Binding, keeper: StateStore, token: bytes | None = None):
        self._binding, self._keeper, self._token = binding, keeper, token
        self._clients: dict[Wire, _Client] = {}
        self._peer_log = RateLimitedLog(log)

    @property
    def urls(self) -> list[str]:
        return self._binding.urls

    def poll(self, timeout_s: float) -> None:
        for event in self._binding.poll(timeout_s):
            try:
                self._take(event)
            except BadMessage as error:
                self._refuse(event.wire, clp.Status.E_PROTOCOL, f"a client sent {error}")
        now = time.monotonic()
        for wire, client in list(self._clients.items()):
            if not client.ready and now - client.since > _GREETING_S:
                self._refuse(wire, clp.Status.E_PROTOCOL, f"no handshake within {_GREETING_S:g} s")

    def close(self) -> None:
        self._binding.close()
        self._keeper.close()

    def _take(self, event: Event) -> None:
        wire = event.wire
        if event.lost is not None:
            self._clients.pop(wire, None)
            return
        if wire not in self._clients:
            if len(self._clients) >= _MAX_CLIENTS:
                wire.close()
                return
            self._clients[wire] = _Client(time.monotonic())
        if event.frames is None:
            return
        client, message = self._clients[wire], read_message(event.frames)
        if client.ready:
            self._answer(wire, message)
        elif message.op == clp.Op.KNOCK:
            asked = from_meta(message.meta, sw.ClientKnock)
            if asked.role != "states" or clp.MAJOR not in [major for major, _ in asked.versions]:
                self._refuse(wire, clp.Status.E_VERSION, "this is a state server, and speaks version 1 of the link")
                return
            client.nonce, client.own_nonce = asked.nonce, new_nonce()
            proof = prove(self._token, sw.SERVER, client.nonce, client.own_nonce)
            welcome = sw.ServerWelcome((clp.MAJOR, clp.MINOR), client.own_nonce, proof, sw.MAX_BYTES)
            wire.send(Message(clp.Op.WELCOME, meta=to_meta(welcome)).frames())
        elif message.op == clp.Op.READY and client.nonce:
            proof = from_meta(message.meta, Ready).proof
            if not is_proven(self._token, proof, sw.CLIENT, client.nonce, client.own_nonce):
                self._refuse(wire, clp.Status.E_AUTH, "a client did not prove that it knows the token")
                return
            client.ready, wire.max_bytes = True, sw.MAX_BYTES + clp.GREETING_BYTES
        else:
            raise BadMessage(f"{clp.Op(message.op).name} in the handshake")

    def _answer(self, wire: Wire, message: Message) -> None:
        reply = Message(message.op, clp.REPLY, seq=message.seq)
        name = (message.meta or {}).get("name", "")
        try:
            if message.op == clp.Op.PUT:
                if len(message.payload) != 1 or len(message.payload[0]) > sw.MAX_BYTES:
                    raise BadMessage(f"a PUT with {len(message.payload)} frames")
                self._keeper.put(name, bytes(message.payload[0]))
            elif message.op == clp.Op.GET:
                state = self._keeper.get(name)
                if state is None:
                    reply.status = clp.Status.E_UNKNOWN_STATE
                reply.payload = [state or b""]
            elif message.op == clp.Op.DROP_STATE:
                reply.meta = {"dropped": self._keeper.drop(name)}
            elif message.op == clp.Op.LIST:
                prefix = (message.meta or {}).get("prefix", "")
                reply.meta = _page(self._keeper.names(prefix if isinstance(prefix, str) else ""), message.meta or {})
            elif message.op == clp.Op.STATS:
                reply.meta = {"snapshots": len(self._keeper.names()), "snapshot_bytes": self._keeper.nbytes}
            elif message.op == clp.Op.CLOSE:
                return
            else:
                raise BadMessage(f"{clp.Op(message.op).name}, which a state server does not support")
        except UserError as error:
            full = isinstance(error, StatesFull)
            reply.status = clp.Status.E_SNAPSHOT_FULL if full else clp.Status.E_BAD_REQUEST
            reply.flags, reply.meta = clp.REPLY | clp.FAILED, {"text": str(error)}
        wire.send(reply.frames())

    def _refuse(self, wire: Wire, status: clp.Status, text: str) -> None:
        self._peer_log.warning(f"{wire.peer}: {text}; closed.")
        wire.send(Message(clp.Op.ERROR, clp.NO_REPLY, status, meta={"text": text}).frames())
        self._clients.pop(wire, None)
        wire.close()


def _page(names: list[str], asked: dict[str, object]) -> dict[str, object]:
    """At most 1000 names after one, so that a reply stays small."""
    after = asked.get("after", "")
    rest = [name for name in names if not isinstance(after, str) or name > after]
    return {"names": rest[:1000], "more": len(rest) > 1000}
