"""The parent's side of one worker process: start it, send to it, read how it ended, end it."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import Any

from corral.core.types import Array
from corral.envs.backends.process.channel import Channel, ChannelClosed
from corral.envs.backends.remote import messages as msg
from corral.envs.backends.remote.handle import RemoteWorker
from corral.runtimes.child import ChildProcess, shared_memory
from corral.runtimes.orphan_reaper import OrphanReaper

_SEND_S = 30.0  # a frame is small; only a worker that stopped reading could make us wait


class WorkerHandle(RemoteWorker):
    """One worker process and the environments it owns."""

    process: ChildProcess

    def __init__(self, index: int, ids: Array, memory_fd: int, job: bytes, reaper: OrphanReaper):
        super().__init__(index, ids)
        self._memory_fd, self._reaper = memory_fd, reaper
        self._job_fd = shared_memory("corral-job", job)  # may be large: a factory can close over anything

    def spawn(self) -> None:
        if self.starts >= 0:
            self.process.close()
        fds = self._memory_fd, self._job_fd
        self.process = ChildProcess("corral.envs.backends.process.child:main", fds, self._reaper)
        self.process.socket.settimeout(_SEND_S)
        self.channel = Channel(self.process.socket)
        self.poll = select.poll()  # to wait for this worker alone
        self.poll.register(self.channel.fileno(), select.POLLIN)
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
        os.close(self._job_fd)


def stop_workers(
    workers: list[WorkerHandle], reaper: OrphanReaper, memory_fd: int, owner_pid: int, timeout_s: float = 5.0
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
    os.close(memory_fd)
