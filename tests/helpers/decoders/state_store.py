"""Decoders of a state server and its client."""

import contextlib
from functools import partial

from corral.core.errors import EnvFailed, UserError
from corral.link import protocol as clp
from corral.link.control import Ready, to_meta
from corral.link.message import Message
from corral.link.transports.base import Event
from corral.link.transports.framing import BadFrames
from corral.snapshot.states import StatesFull
from corral.snapshot.store import client as sw
from corral.snapshot.store.base import MemoryStates, StateBudget
from corral.snapshot.store.client import RemoteStates
from corral.snapshot.store.server import StateServer
from helpers.decoders.wires import MAX, Finite, Scripted, Strange, frames_in, packed


class StateServing:
    """A `corral state-server`: bytes of `tcp://` to it. What does not begin with KNOCK comes after a handshake."""

    def __init__(self):
        self._binding = Scripted()
        self._server = StateServer(self._binding, MemoryStates(StateBudget(MAX, 100)))

    def __call__(self, data):
        """One client, which is lost at the end."""
        wire, first = Strange(), True
        self._post(Event(wire))
        with contextlib.suppress(BadFrames):
            for frames in frames_in(data):
                if first and len(frames[0]) == clp.HEADER.size and frames[0][3] != clp.Op.KNOCK:
                    self._post(Event(wire, Message(clp.Op.KNOCK, meta=to_meta(sw.knock(bytes(16)))).frames()))
                    self._post(Event(wire, Message(clp.Op.READY, meta=to_meta(Ready(b""))).frames()))
                first = False
                self._post(Event(wire, frames))
                if wire.closed:
                    break
        self._post(Event(wire, lost="gone"))
        assert not self._server._clients

    def _post(self, event):
        self._binding.events = [event]
        self._server.poll(0)


class StateClient:
    """What a state server answers, to a client that asks for all there is; the number of the request is put right."""

    def __init__(self):
        self._client = RemoteStates("tcp://127.0.0.1:1")
        self._client._binding.close()
        self._client._binding = self._server = Finite()

    def __call__(self, data):
        """Each request gets these answers."""
        client, server = self._client, self._server
        try:
            answers = list(frames_in(data))
        except BadFrames:
            return
        for ask in (partial(client.get, "a"), partial(client.drop, "a"), client.names, lambda: client.nbytes):
            wire = client._wire = Strange()
            client._ready = True
            server.events = []
            for number, frames in enumerate(answers[:3]):
                if len(frames[0]) == clp.HEADER.size:
                    seq = (client._seq + 1 + number).to_bytes(8, "little")
                    frames = [frames[0][:8] + seq + frames[0][16:], *frames[1:]]
                server.events.append(Event(wire, frames))
            with contextlib.suppress(EnvFailed, UserError, StatesFull):
                ask()


def good_state_requests():
    def ask(op, meta, *payload):
        return Message(op, seq=1, meta=meta, payload=list(payload))

    op = clp.Op
    asked = [
        ask(op.PUT, {"name": "a"}, b"state"), ask(op.GET, {"name": "a"}), ask(op.DROP_STATE, {"name": "a"}),
        ask(op.LIST, {"prefix": "a", "after": ""}), ask(op.STATS, {}), ask(op.CLOSE, {"reason": ""}),
    ]  # fmt: skip
    greeting = [Message(op.KNOCK, meta=to_meta(sw.knock(bytes(16)))), Message(op.READY, meta=to_meta(Ready(b"")))]
    return [packed(*greeting), *map(packed, asked), packed(*asked), packed(*greeting, *asked)]


def good_state_answers():
    def answer(op, meta=None, *payload, flags=clp.REPLY, status=0):
        return packed(Message(op, flags, status, meta=meta, payload=list(payload)))

    op = clp.Op
    return [
        answer(op.GET, None, b"state"), answer(op.GET, None, b"", status=clp.Status.E_UNKNOWN_STATE),
        answer(op.DROP_STATE, {"dropped": True}), answer(op.LIST, {"names": ["a", "b"], "more": False}),
        answer(op.LIST, {"names": ["a"], "more": True}) + answer(op.LIST, {"names": ["b"], "more": True}),
        answer(op.STATS, {"snapshots": 1, "snapshot_bytes": 5}),
        answer(op.PUT, {"text": "full"}, flags=clp.REPLY | clp.FAILED, status=clp.Status.E_SNAPSHOT_FULL),
        answer(op.ERROR, {"text": "no"}, flags=clp.NO_REPLY, status=clp.Status.E_AUTH),
    ]  # fmt: skip
