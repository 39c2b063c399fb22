"""A simulator written by hand, whose answers to RESET and STEP are changed by the test before they are sent."""

import socket
import threading

import gymnasium
import numpy as np

from corral.core.spaces import Layout
from corral.link import protocol as clp
from corral.link.layout import RowsLayout, layout_hash, space_group
from corral.link.message import Message, read_message
from corral.link.transports.framing import FrameReader, pack

OBSERVATION, ACTION = Layout(gymnasium.spaces.Box(-10, 10, (2,), np.float32)), Layout(gymnasium.spaces.Discrete(3))


class RawSim:
    """Dials a learner that listens. `change(op, table, obs)` gets the rows' leaves, all zero, and the observations; it
    may return the final observations of the episodes that it ends.
    """

    def __init__(self, url, change, observation=OBSERVATION):
        host, port = url.partition("://")[2].split(":")
        self._observation = observation
        self._change, self._socket = change, socket.create_connection((host, int(port)), 20)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._socket.close()

    def _run(self):
        hello = {
            "versions": [[1, 0]], "sdk": "by hand", "env": "raw", "env_version": 1, "instance": b"i" * 16,
            "nonce": b"n" * 16, "session": 0, "observation": self._observation.to_json(), "action": ACTION.to_json(),
            "players": 1, "slots": 8, "threads": 1, "level": 0, "exact": True, "capabilities": [],
        }  # fmt: skip
        self._send(Message(clp.Op.HELLO, meta=hello))
        reader, session = FrameReader(1 << 20), 0
        while size := self._receive(reader.room()):
            reader.took(size)
            while (frames := reader.next()) is not None:
                message = read_message(frames)
                if message.op == clp.Op.WELCOME:
                    session = message.meta["session"]
                    self._send(Message(clp.Op.READY, meta={"proof": b""}))
                elif message.op in (clp.Op.RESET, clp.Op.STEP):
                    self._answer(message, session)

    def _receive(self, room):
        try:
            return self._socket.recv_into(room)
        except OSError:
            return 0

    def _answer(self, message, session):
        rows, table = RowsLayout().group().make(message.batch)
        frame, (obs,) = space_group(self._observation).make(message.batch)
        if message.op == clp.Op.RESET:
            table[1][:] = clp.FIRST
        final, payload = self._change(message.op, table, obs), [rows, frame]
        if final is not None:
            payload.append(space_group(self._observation).write([final], len(final)))
        layout = layout_hash(self._observation, ACTION)
        self._send(Message(message.op, clp.REPLY, 0, message.seq, session, layout, message.batch, 1, None, payload))

    def _send(self, message):
        self._socket.sendall(b"".join(bytes(part) for part in pack(message.frames())))
