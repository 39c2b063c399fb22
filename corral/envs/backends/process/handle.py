"""The parent's side of one worker process: start it, talk to it, read its last words, end it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import spawn
from typing import Any

from corral.core.types import Array
from corral.envs.backends.process import channel as ch
from corral.envs.backends.remote.handle import RemoteWorker
from corral.runtimes.orphan_reaper import OrphanReaper

# One thread per worker: environments are many, and each numeric library would otherwise take every core.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
_BOOT = "import sys; sys.path[:] = {path!r}; from corral.envs.backends.process.child import main; main({args})"


def shared_memory(name: str) -> int:
    """File descriptor of memory without a name in the file system, so nothing is left behind by a crash.

    Unlike /dev/shm, which containers keep small, a memfd is bounded by the machine's memory alone.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def plug_stdio() -> None:
    """Open /dev/null in place of a stdin, stdout or stderr that was closed.

    Otherwise shared memory would get such a number, and what an environment prints would land in it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


class WorkerHandle(RemoteWorker):
    """One worker process and the environments it owns."""

    def __init__(self, index: int, ids: Array, memory_fd: int, job: bytes, sentry: OrphanReaper):
        super().__init__(index, ids)
        self._memory_fd, self._sentry = memory_fd, sentry
        self._job_fd = shared_memory("corral-job")  # may be large: a factory can close over anything
        with open(self._job_fd, "wb", closefd=False) as file:
            file.write(job)

    def spawn(self) -> None:
        """Start the process, in the place of one that has ended, and tell it which environments to build."""
        if self.starts >= 0:
            self.release()
        ours, theirs = socket.socketpair()
        self._dump_fd = shared_memory("corral-stacks")
        fds = (theirs.fileno(), self._memory_fd, self._job_fd, self._dump_fd)
        code = _BOOT.format(
            path=[entry for entry in sys.path if isinstance(entry, str)],
            args=", ".join(map(repr, (*fds, os.getpid()))),
        )
        executable: Any = spawn.get_executable()
        with theirs:
            self.process = subprocess.Popen(
                [executable, "-c", code],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")},
                start_new_session=True,  # its own group: Ctrl-C is the parent's to handle, and kill() gets all of it
            )
        self._sentry.guard(self.process.pid)
        ours.settimeout(30.0)  # a frame is small; only a worker that stopped reading could make us wait
        self.channel = ch.Channel(ours)
        self.poll = select.poll()  # to wait for this worker alone
        self.poll.register(ours.fileno(), select.POLLIN)
        self.reset()

    def post(self, op: int, data: Any = None) -> None:
        """Send a message; a worker found dead is replaced by the next recv."""
        with contextlib.suppress(ch.ChannelClosed):
            self.channel.send_json(op, data)

    def dump_stacks(self) -> None:
        """Ask for the stacks of all its threads; works even while a C function holds the interpreter lock."""
        before = os.fstat(self._dump_fd).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        until = time.monotonic() + 1.0
        while os.fstat(self._dump_fd).st_size == before and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.05)  # the handler writes in several pieces

    def exit_report(self) -> str:
        """How the process ended, and the stacks it left."""
        code = self.process.returncode
        ending = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        text = os.pread(self._dump_fd, 1 << 16, 0).decode(errors="replace")
        return f"its process ended with {ending}" + (f"; its stack:\n{text}" if text else "")

    def kill(self) -> None:
        """End the process and everything it started."""
        # The group outlives its leader until we reap it, so the id cannot have been reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._sentry.release(self.process.pid)

    def release(self) -> None:
        """Close what belongs to a process that has ended."""
        self.channel.close()
        os.close(self._dump_fd)

    def forget(self) -> None:
        """There will be no other process."""
        os.close(self._job_fd)


def stop_workers(
    workers: list[WorkerHandle], sentry: OrphanReaper, memory_fd: int, owner_pid: int, patience_s: float = 5.0
) -> None:
    """Let every worker close its environments, then end those that did not.

    A fork of the owner inherits this as a finalizer; the workers are not its to end.
    """
    if os.getpid() != owner_pid:
        return
    for worker in workers:
        with contextlib.suppress(ch.ChannelClosed, OSError):
            worker.channel.send(ch.CLOSE)
    until = time.monotonic() + patience_s
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, until - time.monotonic()))
        worker.kill()
        worker.release()
        worker.forget()
    workers.clear()
    sentry.stop()
    os.close(memory_fd)
