"""A worker's side of one call: build what the learner names, step it, and know when the call has ended, and why.

The main thread runs the environments. Another reads, so that the learner can ask what the main thread is doing, and so
that the end of the call is noticed while an environment hangs.
"""

from __future__ import annotations

import gc
import os
import queue
import socket
import sys
import threading
import traceback
from typing import Any

import numpy as np

from corral import __version__
from corral.core.encoding import DecodeError
from corral.core.errors import EnvFailed, UserError
from corral.core.types import Array, EnvSpec
from corral.envs import grpc_wire as wire
from corral.envs.backends.remote import messages as ch
from corral.envs.backends.remote.worker import EnvWorker
from corral.envs.grpc_text import EnvText
from corral.envs.stepping.group import EnvGroup
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.rows import EnvRows, pack, unpack
from corral.envs.supervision import IDLE
from corral.link.transports import grpc as rpc

GIVEN_UP = 3  # exit code of a process whose environment hangs; another takes its place
_FINISH_S = 5.0  # for an environment to end its step when the run is over
_GIVEN_UP_S = 0.5
_ANSWER_S = 10.0  # for a learner to say what to build, which it does at once
_FLUSH_S = 10.0  # for the learner to get to know what went wrong


class Session(EnvWorker):
    """One call of a worker; `serve` once."""

    name = ""
    """Of the environments, once the learner has said it."""
    ids: tuple[int, ...] = ()
    joined = False
    status, words = "UNAVAILABLE", ""
    """How the call ended: the name of gRPC's status code, and the learner's words."""

    def __init__(self, channel: Any, hang_s: float):
        """`hang_s`: how long an environment may go on with a step after the connection was lost."""
        self._channel, self._hang_s = channel, hang_s
        self._main = threading.get_ident()
        self._mark = memoryview(bytearray(8)).cast("q")  # the environment that is being stepped
        self._mark[0] = IDLE
        # Both are bounded by what the learner asks for: a step for each environment, and an answer to each.
        self._inbox: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._over, self._idle = threading.Event(), threading.Event()

    def serve(self) -> None:
        """Do what the learner asks for until the call ends; raises what an environment raises, once that is told."""
        about = ((wire.VERSION, __version__), (wire.HOST, _ascii(socket.gethostname())), (wire.PID, str(os.getpid())))
        method = self._channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")
        call = method(iter(self._outbox.get, None), metadata=about)
        threading.Thread(target=self._read, args=(call,), daemon=True).start()
        try:
            item = self._inbox.get(timeout=_ANSWER_S)
            while item is not None:
                self._do(*item)
                item = self._inbox.get()
        except queue.Empty:
            call.cancel()
            self._over.wait(_FLUSH_S)
            self.words = f"it takes calls, and says nothing for {_ANSWER_S:g} s"
        except Exception as error:
            known = isinstance(error, UserError | EnvFailed)
            text = str(error) if known else "".join(traceback.format_exception(error))
            self.post(ch.FAILED, {"kind": "user" if isinstance(error, UserError) else "failed", "text": text})
            self._outbox.put(None)
            self._over.wait(_FLUSH_S)
            raise
        finally:
            self._outbox.put(None)
            call.cancel()
            self.close()
            gc.unfreeze()  # what this call has built is not for ever
            self._idle.set()

    def post(self, op: int, data: Any) -> None:
        """Answer; the rows of restored environments go before the word that they are."""
        if op == ch.LOADED:
            self._post_rows(wire.PARCEL, np.array(self.ids))
        self._outbox.put(wire.to_bytes(op, data))

    def announce(self, done: IdSet) -> None:
        """Send the rows along."""
        self._post_rows(ch.READY, done.ids)

    def make_rows(self, spec: EnvSpec, num_envs: int) -> EnvRows:
        """Rows of its own."""
        return EnvRows(spec, num_envs)

    def visible_mark(self, rows: EnvRows) -> Any:
        """Memory that the reading thread sees."""
        return self._mark

    def _post_rows(self, op: int, ids: Array) -> None:
        for part in wire.parts(self._rows.spec, ids):
            self._outbox.put(wire.to_bytes(op, pack(self._rows, self._sets.of(part))))

    def _do(self, op: int, data: Any) -> None:
        if op == wire.BUILD:
            self._build(data)
        elif op == ch.STEP:
            self._take(*data)
        elif op == wire.PARCEL:
            unpack(self._rows, self._sets.of_payload(data.env_ids), data)
        else:
            self.handle(op, data)

    def _build(self, job: dict[str, Any]) -> None:
        self.joined, self.name, self.ids = True, job["name"], tuple(env_id for env_id, _ in job["envs"])
        factories = {env_id: EnvText(*text).resolve().factory for env_id, text in job["envs"]}
        self._group = EnvGroup(factories, self.name, self._report, [IDLE])
        self.post(ch.SPEC, self._group.build().to_json())

    def _take(self, env_ids: bytes, actions: list[Array]) -> None:
        chosen = self._sets.of_payload(env_ids)
        for row, leaf in zip(self._rows.action, actions, strict=True):
            row[chosen.index] = leaf
        self._rows.flip(chosen)
        self.step(chosen)

    # -- in the reading thread -----------------------------------------------------------------------------

    def _read(self, call: Any) -> None:
        try:
            for data in call:
                op, content = wire.from_bytes(data)
                if op == wire.LOOK:
                    self._outbox.put(wire.to_bytes(wire.SEEN, {"mark": self._mark[0], "stack": self._stack()}))
                else:
                    self._inbox.put((op, content))
            self.status = call.code().name
        except rpc.import_grpc().RpcError:
            self.status, self.words = call.code().name, call.details()
        except (DecodeError, TypeError) as error:
            self.words = f"what came is no message ({error})"
            call.cancel()
        self._over.set()
        self._inbox.put(None)
        limit = {"OK": _FINISH_S, "ABORTED": _GIVEN_UP_S}.get(self.status, self._hang_s)
        if not self._idle.wait(limit):  # the environment hangs, and nobody else can end it
            os._exit(0 if self.status == "OK" else GIVEN_UP)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main)
        return "".join(traceback.format_stack(frame)) if frame else ""


def _ascii(text: str) -> str:
    """Metadata are plain text."""
    return text.encode("ascii", "replace").decode()
