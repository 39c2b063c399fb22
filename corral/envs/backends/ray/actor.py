"""Code of a Ray worker process: an actor with some environments, and a task that inspects an actor that hangs."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from corral.core.types import Array, EnvSpec
from corral.envs.backends.remote import messages as msg
from corral.envs.backends.remote.worker import EnvWorker, failure
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.rows import CopiedRows, EnvRows, pack, unpack
from corral.envs.supervision import IDLE

# Above this, a separate call for each environment costs little compared to its step.
_SLOW_STEP_S = 0.005


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where an actor runs, and how another process on its node can inspect it."""

    node_id: str
    pid: int
    stacks_fd: int
    mark_fd: int


@dataclass(slots=True)
class ActorReply:
    """An actor's messages in answer to one call, in order; READY and ROWS carry CopiedRows."""

    messages: list[tuple[int, Any]] = field(default_factory=list)
    slow: bool | None = None  # whether steps take long; None without a step


class EnvActor(EnvWorker):
    """Some environments as a Ray actor: one call at a time, on its main thread."""

    def __init__(self) -> None:
        self._reply = ActorReply()
        self._stacks = os.fdopen(os.memfd_create("corral-stacks"), "w")
        self._mark_fd = os.memfd_create("corral-mark")
        os.ftruncate(self._mark_fd, 8)
        self._mark = memoryview(mmap.mmap(self._mark_fd, 8)).cast("q")
        self._mark[0] = IDLE
        faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True)

    def place(self) -> NodePlace:
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        return NodePlace(node_id, os.getpid(), self._stacks.fileno(), self._mark_fd)

    def build(self, job: bytes, path: list[str]) -> ActorReply:
        """Build the environments, with the parent's import path."""
        sys.path += [entry for entry in path if entry not in sys.path]
        return self._answer(self.start, job)

    def ask(self, op: int, data: Any, rows: CopiedRows | None = None) -> ActorReply:
        return self._answer(self._ask, op, data, rows)

    def take(self, env_ids: bytes, actions: list[Array]) -> ActorReply:
        return self._answer(self._take, env_ids, actions)

    def _answer(self, do: Any, *args: Any) -> ActorReply:
        self._reply = reply = ActorReply()
        try:
            do(*args)
        except BaseException as error:
            self.post(msg.FAILED, failure(error))
        return reply

    def _ask(self, op: int, data: Any, rows: CopiedRows | None) -> None:
        if rows is not None:
            unpack(self._rows, self._sets.of_payload(rows.env_ids), rows)
        self.handle(op, data)
        if rows is not None:
            self.post(msg.ROWS, pack(self._rows, self._sets.of_payload(rows.env_ids)))

    def _take(self, env_ids: bytes, actions: list[Array]) -> None:
        chosen = self._sets.of_payload(env_ids)
        self._rows.write_actions(chosen, actions)
        self._rows.flip(chosen)
        start = time.perf_counter()
        self.step(chosen)
        self._reply.slow = time.perf_counter() - start > _SLOW_STEP_S * len(chosen)

    def post(self, op: int, data: Any) -> None:
        self._reply.messages.append((op, data))

    def announce(self, done: IdSet) -> None:
        self.post(msg.READY, pack(self._rows, done))

    def make_rows(self, spec: EnvSpec, num_envs: int) -> EnvRows:
        return EnvRows(spec, num_envs)

    def visible_mark(self, rows: EnvRows) -> Any:
        return self._mark


def inspect_actor(place: NodePlace) -> tuple[int, str]:
    """Runs on an actor's node: the environment it is stepping, and its stacks, even if C code holds the GIL."""
    with open(f"/proc/{place.pid}/fd/{place.mark_fd}", "rb") as file:
        mark: int = struct.unpack("q", file.read(8))[0]
    stacks = f"/proc/{place.pid}/fd/{place.stacks_fd}"
    before = os.stat(stacks).st_size
    os.kill(place.pid, signal.SIGUSR1)
    until = time.monotonic() + 1.0
    while os.stat(stacks).st_size == before and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.05)  # the handler writes in several pieces
    with open(stacks, "rb") as file:
        file.seek(before)  # skip earlier dumps
        return mark, file.read(1 << 16).decode(errors="replace")
