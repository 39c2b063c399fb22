"""Environments in worker processes, several in each, with observations and actions in shared memory.

A step costs the parent one small message to each worker and one from it; both sides sleep in between. While the caller
selects actions for some environments, the workers step the others.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

from corral.core.encoding import decode
from corral.core.gym_env import EnvFactory
from corral.core.machine import require_processes
from corral.core.portable import READABLE, new_poll
from corral.core.types import Array
from corral.envs.backends.process.channel import Channel, ChannelClosed, frame
from corral.envs.backends.remote import messages as msg
from corral.envs.backends.remote.vec_env import RemoteVecEnv, RemoteWorker
from corral.envs.stepping.id_set import IdSet, SetCache
from corral.envs.stepping.rows import EnvRows
from corral.envs.supervision import Supervision
from corral.runtimes.child import ChildProcess, plug_stdio, start_child
from corral.runtimes.orphan_reaper import OrphanReaper
from corral.runtimes.shared_memory import SharedMemory, shared_memory

_WORKER_BYTES = 20_000_000  # an interpreter with NumPy and Gymnasium
_SEND_S = 30.0  # a frame is small; only a worker that stopped reading could make us wait


class WorkerHandle(RemoteWorker):
    """One worker process and the environments it owns."""

    process: ChildProcess

    def __init__(self, index: int, ids: Array, memory: SharedMemory, job: bytes, reaper: OrphanReaper):
        super().__init__(index, ids)
        self._memory, self._reaper = memory, reaper
        self._job = shared_memory("corral-job", job)  # may be large: a factory can close over anything

    def spawn(self) -> None:
        if self.starts >= 0:
            self.process.close()
        memories = self._memory, self._job
        self.process = start_child("corral.envs.backends.process.child:main", memories, self._reaper)
        self.process.socket.settimeout(_SEND_S)
        self.channel = Channel(self.process.socket)
        self.poll = new_poll()  # to wait for this worker alone
        self.poll.register(self.channel.fileno(), READABLE)
        self.reset()

    def post(self, op: int, data: Any = None) -> None:
        with contextlib.suppress(ChannelClosed):
            self.channel.send(op, data)

    def kill(self) -> None:
        self.process.kill()

    def exit_report(self) -> str:
        stacks = self.process.stacks
        return f"its process ended with {self.process.ending}" + (f"; its stack:\n{stacks}" if stacks else "")

    def forget(self) -> None:
        self.process.close()
        self._job.close()


def stop_workers(
    workers: list[WorkerHandle], reaper: OrphanReaper, memory: SharedMemory, owner_pid: int, timeout_s: float = 5.0
) -> None:
    """Let every worker close its environments, then kill the rest; does nothing in a fork of the owner."""
    if os.getpid() != owner_pid:
        return
    for worker in workers:
        with contextlib.suppress(ChannelClosed, OSError):
            worker.channel.send(msg.CLOSE)
    until = time.monotonic() + timeout_s
    for worker in workers:
        worker.process.wait(until)
        worker.kill()
        worker.forget()
    workers.clear()
    reaper.stop()
    memory.close()


class ProcessVecEnv(RemoteVecEnv[WorkerHandle]):
    """VecEnv over worker processes."""

    def __init__(
        self, factories: Sequence[EnvFactory], name: str, supervision: Supervision, workers: int, role: str = "train"
    ):
        require_processes(workers, _WORKER_BYTES, f"{name} with {workers:,} worker processes")
        super().__init__(len(factories), name, supervision, workers, role)
        self._routes = SetCache[list[tuple[WorkerHandle, bytes, int]]](self.num_envs)
        jobs = self._jobs(factories, workers)
        plug_stdio()
        self._memory = shared_memory("corral-rows")
        self._reaper = OrphanReaper()
        self._poll = new_poll()
        self._by_fd: dict[int, WorkerHandle] = {}
        # Independent of self, so that an unclosed VecEnv ends its workers when collected or at exit.
        self._stop = weakref.finalize(self, stop_workers, self._workers, self._reaper, self._memory, os.getpid())
        self._start_all([WorkerHandle(index, ids, self._memory, job, self._reaper) for index, ids, job in jobs])

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers; environment `i` runs in worker `i % len(worker_pids)`."""
        return [worker.process.pid for worker in self._workers]

    def _start(self, worker: WorkerHandle) -> None:
        super()._start(worker)
        self._by_fd[worker.channel.fileno()] = worker
        self._poll.register(worker.channel.fileno(), READABLE)

    def _end(self, worker: WorkerHandle) -> None:
        fd = worker.channel.fileno()
        self._poll.unregister(fd)
        del self._by_fd[fd]
        super()._end(worker)

    def _make_rows(self) -> EnvRows:
        memory = self._memory.create(EnvRows.nbytes(self.spec, self.num_envs))
        return EnvRows(self.spec, self.num_envs, memory)

    def _dispatch(self, chosen: IdSet, actions: list[Array]) -> None:
        self._rows.write_actions(chosen, actions)
        for worker, data, count in self._routes.get(chosen) or self._route(chosen):
            if worker.pending == 0:
                worker.heartbeat()
            worker.pending += count
            with contextlib.suppress(ChannelClosed):  # the next recv finds it dead and replaces it
                worker.channel.send_frame(data)
            self._last_sent = worker

    def _route(self, chosen: IdSet) -> list[tuple[WorkerHandle, bytes, int]]:
        owner = self._worker_of[chosen.ids]
        route = []
        for worker in self._workers:
            part = chosen.ids[owner == worker.index]
            if len(part):
                route.append((worker, frame(msg.STEP, self._in_flight.sets.of(part).payload), len(part)))
        self._routes[chosen] = route
        return route

    def _receive(self, last: WorkerHandle | None, wait_s: float) -> None:
        """If all results are needed, poll only the last worker: one wake-up instead of one per worker."""
        wait_ms = 1000 * wait_s
        if last is not None and last.pending:
            last.poll.poll(wait_ms)
            wait_ms = 0
        for fd, _ in self._poll.poll(wait_ms):
            worker = self._by_fd[fd]
            try:
                for op, payload in worker.channel.read():
                    if op == msg.READY:
                        self._ready(worker, self._in_flight.sets.of_payload(payload))
                    else:
                        self._handle(worker, op, decode(bytearray(payload)))
            except ChannelClosed:
                self._replace(worker, "killed")

    def _check_alive(self, worker: WorkerHandle, now: float) -> None:
        if worker.process.has_ended():  # its socket may be held open by its forks
            self._replace(worker, "killed")
            return
        if worker.running:
            if worker.pending == 0:
                return
            mark = int(self._rows.mark[worker.index])
            if mark != worker.last_mark:
                worker.last_mark = mark
                worker.heartbeat()
            limit = self._supervision.limit_s(mark)
        else:
            limit = self._supervision.start_timeout_s
        if now - worker.busy_since > limit:
            worker.process.dump_stacks()
            self._replace(worker, "hung", f"no result for {limit:g} s, so ")
