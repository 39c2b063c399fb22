"""One client of the JSON loop, as the fleet sees it: a CLP simulator with one slot.

It waits for the learner (its last message has no answer yet) or the learner waits for it (a RESET or STEP is in
flight), never both, because a REQ socket sends and receives in turn:

    learner                    here                              client
                                          <- reset, obs            first message: HELLO, READY
    RESET     ->               seeded?     -> {"reset", "seed"}    otherwise the pending observation is used
    rows, obs <-                          <- reset, obs
    STEP      ->                           -> {"action": a}
    rows, obs <-                          <- step, obs, reward
    STEP      ->                           -> {"action": a}
                                          <- step, terminated      answered at once: {"action": null}
    rows, obs, final <-                   <- reset, obs
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from corral.core.encoding import Buffer
from corral.core.spaces import Layout
from corral.link import protocol as clp
from corral.link.auth import new_nonce
from corral.link.control import OURS, Hello, Ready, Welcome, from_meta, to_meta
from corral.link.layout import RowsLayout, layout_hash, space_group
from corral.link.message import BadMessage, Message, read_message
from corral.link.transports.base import Event, Wire
from corral.link.transports.json_values import ClientError, ClientMessage, action_value, max_message_bytes, read_obs

log = logging.getLogger("corral.link")

NAME = "a JSON simulator"
OVER = {"action": None, "terminate": True}
_ROWS = RowsLayout(players=1, raw_reward=True).group()
_REWARD, _RAW, _FLAGS, _STATUS = range(4)
MAX_TEXT = 500  # characters of an error


class _Row(NamedTuple):
    flags: int = 0
    reward: float = 0.0
    raw_reward: float = 0.0
    status: int = 0
    text: str = ""


class JsonPeer(Wire):
    """A client that has sent its first `reset`."""

    def __init__(self, env_id: str | int | float, peer: str, spaces: tuple[Layout, Layout], most: int):
        self.env_id, self.peer = env_id, f"{peer} (env_id {env_id!r})"
        self.json_bytes = max_message_bytes(spaces[0], most)  # larger messages of this client are an error
        self.lost: str | None = None  # why nothing more is sent or received
        self.waits = True
        self.answer: Callable[[Any], None] = lambda value: None
        """Sends a JSON value to the client; set by the owner of the socket, as is `emit`, which forwards events."""
        self.emit: Callable[[Event], None] = lambda event: None
        self._spaces = spaces
        self._observation, self._action = map(space_group, spaces)
        self._layout, self._session = layout_hash(*spaces), 0
        self._obs: Buffer = b""
        self._fresh = self._seeded = False  # is the observation an episode's first; does the client accept seeds
        self._request: tuple[int, int] | None = None  # op and number of the request in flight
        self._asked_at = 0.0
        self._last: tuple[_Row, Buffer] | None = None  # of an ended episode, until the next begins
        self._farewell = "the learner closed the connection"

    def hello(self, message: ClientMessage) -> None:
        """Handle the first message and announce the client to the learner; ClientError when it does not fit."""
        self._start(message)
        observation, action = (space.to_json() for space in self._spaces)
        instance = bytes.fromhex(message.instance) or new_nonce()
        hello = Hello(
            list(OURS), "zmq+json", NAME, 0, instance, new_nonce(), 0, observation, action,
            players=1, slots=1, threads=1, level=0, exact=True, capabilities=["raw_reward"],
        )  # fmt: skip
        self.emit(Event(self))
        self._emit_message(Message(clp.Op.HELLO, meta=to_meta(hello)))

    def take(self, message: ClientMessage) -> None:
        if message.command == "terminate":
            self._reply_to_client({"action": None})
            self.leave("it terminated")
            return
        if message.env_id != self.env_id:
            raise ClientError(f"the env_id changed from {self.env_id!r} to {message.env_id!r}; use a socket per id")
        if self.waits:
            raise ClientError("a message came before the last one was answered")
        self.waits = True
        if message.command == "reset":
            self._take_reset(message)
        else:
            self._take_step(message)

    def fail(self, text: str) -> None:
        self._reply_to_client({"error": text})
        self._end(Message(clp.Op.ERROR, clp.NO_REPLY, clp.Status.E_PROTOCOL, meta={"text": text}), text)

    def leave(self, reason: str) -> None:
        self._end(Message(clp.Op.CLOSE, clp.NO_REPLY, meta={"reason": reason}), reason)

    def _take_reset(self, message: ClientMessage) -> None:
        assert self._request is not None
        self._start(message)
        if self._request[0] == clp.Op.RESET:
            self._reply(_Row(clp.FIRST))
        elif self._last is not None:
            self._reply_last(self._obs)
        else:
            text = "the simulator started over in the middle of an episode"
            self._reply(_Row(clp.TRUNCATED | clp.FAULTY | clp.FIRST, status=clp.Status.E_ENV, text=text))

    def _take_step(self, message: ClientMessage) -> None:
        assert self._request is not None
        if self._request[0] != clp.Op.STEP or self._last is not None:
            raise ClientError("a step where a reset was expected")
        assert message.reward is not None
        raw = message.reward if message.raw_reward is None else message.raw_reward
        obs = self._observation.write(read_obs(message.obs, self._spaces[0]), 1)
        if not (message.terminated or message.truncated):
            self._obs, self._fresh = obs, False
            self._reply(_Row(0, message.reward, raw))
            return
        flags = clp.TERMINATED * bool(message.terminated) | clp.TRUNCATED * bool(message.truncated)
        self._last = _Row(flags | clp.FIRST | clp.LIFE * message.life_lost, message.reward, raw), obs
        self._reply_to_client({"action": None})

    def _start(self, message: ClientMessage) -> None:
        self._obs = self._observation.write(read_obs(message.obs, self._spaces[0]), 1)
        self._fresh, self._seeded = True, message.seeded

    def send(self, frames: Sequence[Buffer]) -> None:
        if self.lost is not None:
            return
        message = read_message(frames)
        if message.op == clp.Op.WELCOME:
            self._welcomed(from_meta(message.meta, Welcome))
        elif message.op == clp.Op.ERROR:
            self._farewell = message.text
        elif message.op == clp.Op.CLOSE:
            if self.waits:  # otherwise it is told with its next message
                self._reply_to_client(OVER)
                self._disconnect("closed here")
        elif message.op in (clp.Op.RESET, clp.Op.STEP):
            self._ask(message)
        elif message.op == clp.Op.HEARTBEAT:
            self._emit_message(Message(message.op, clp.REPLY, 0, message.seq))
        elif not message.flags & (clp.REPLY | clp.NO_REPLY):
            self._refuse(message, clp.Status.E_UNSUPPORTED, "a JSON simulator does not support this request")

    def close(self) -> None:
        """Disconnect this client with the reason from the preceding CLOSE or ERROR."""
        if self.lost is None:
            if self.waits:
                self._reply_to_client({"error": self._farewell[:MAX_TEXT]})
            self._disconnect("closed here")

    def _welcomed(self, welcome: Welcome) -> None:
        self._session = welcome.session
        if welcome.proof:
            self.fail("this learner requires a token, which a JSON simulator cannot prove: use zmq:// or no token_file")
        else:
            self._emit_message(Message(clp.Op.READY, meta=to_meta(Ready(b""))))

    def _ask(self, message: Message) -> None:
        if self._request is not None or not self.waits:
            self._refuse(message, clp.Status.E_BAD_REQUEST, "the slot has another request in flight")
            return
        try:
            slots, what = message.payload
            if message.batch != 1 or bytes(slots) != bytes(4):
                raise BadMessage("only slot 0 exists")
            if message.op == clp.Op.STEP:
                leaves = self._action.read(what, 1)
        except (BadMessage, ValueError) as error:
            self._refuse(message, clp.Status.E_BAD_REQUEST, str(error))
            return
        self._request, self._asked_at = (message.op, message.seq), time.perf_counter()
        if message.op == clp.Op.STEP:
            self._reply_to_client({"action": action_value(leaves, self._spaces[1])})
        elif self._seeded:
            self._reply_to_client({"reset": True, "seed": int.from_bytes(what, "little")})
        else:
            if not self._fresh:
                log.info("%s does not accept resets: its episode continues as if it were a new one.", self.peer)
            self._reply(_Row(clp.FIRST * self._fresh))

    def _reply_to_client(self, value: Any) -> None:
        self.waits = False
        self.answer(value)

    def _reply(self, row: _Row, obs: Buffer | None = None, final: Buffer | None = None) -> None:
        assert self._request is not None
        op, seq = self._request
        self._request = None
        frame, table = _ROWS.make(1)
        table[_REWARD][:], table[_RAW][:] = row.reward, row.raw_reward
        table[_FLAGS][:], table[_STATUS][:] = row.flags, row.status
        payload: list[Buffer] = [frame, self._obs if obs is None else obs]
        if final is not None:
            payload.append(final)
        took = min(int((time.perf_counter() - self._asked_at) * 1e6), 0xFFFFFFFF)
        meta = {"rows": {"0": row.text}} if row.text else None
        self._emit_message(Message(op, clp.REPLY, 0, seq, batch=1, aux=took, meta=meta, payload=payload))

    def _reply_last(self, first: Buffer) -> None:
        assert self._last is not None
        row, final = self._last
        self._last = None
        self._reply(row, first, final)

    def _refuse(self, message: Message, status: clp.Status, text: str) -> None:
        meta = {"text": f"{clp.Op(message.op).name}: {text}"}
        self._emit_message(Message(message.op, clp.REPLY | clp.FAILED, status, message.seq, meta=meta))

    def _end(self, goodbye: Message, reason: str) -> None:
        """Leave with a goodbye (the session never resumes); an ended episode is delivered with its last observation."""
        if self.lost is not None:
            return
        if self._last is not None:
            self._reply_last(self._last[1])
        self._emit_message(goodbye)
        self._disconnect(reason)

    def _disconnect(self, reason: str) -> None:
        self.lost = reason
        self.emit(Event(self, lost=reason))

    def _emit_message(self, message: Message) -> None:
        message.session, message.layout = self._session, self._layout if self._session else 0
        self.emit(Event(self, message.frames()))
