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
import threading
import time
from multiprocessing import spawn
from typing import Any

from corral.envs import channel as ch
from corral.types import Array

# One thread per worker: environments are many, and each numeric library would otherwise take every core.
_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
_BOOT = "import sys; sys.path[:] = {path!r}; from corral.envs.worker import main; main({args})"


def shared_memory(name: str) -> int:
    """File descriptor of memory without a name in the file system, so nothing is left behind by a crash.

    Unlike /dev/shm, which containers keep small, a memfd is bounded by the machine's memory alone.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class WorkerHandle:
    """One worker process and the environments it owns."""

    def __init__(self, index: int, ids: Array, memory_fd: int, start: bytes):
        self.index, self.ids = index, ids
        self._memory_fd, self._start = memory_fd, start
        self.spawn()

    def spawn(self) -> None:
        """Start the process, and tell it which environments to build."""
        ours, theirs = socket.socketpair()
        self._dump_fd = shared_memory("corral-stacks")
        args = (theirs.fileno(), self._memory_fd, self._dump_fd, os.getpid(),
                threading.current_thread() is threading.main_thread())  # fmt: skip
        code = _BOOT.format(path=sys.path, args=", ".join(map(repr, args)))
        executable: Any = spawn.get_executable()
        with theirs:
            self.process = subprocess.Popen(
                [executable, "-c", code],
                pass_fds=(theirs.fileno(), self._memory_fd, self._dump_fd),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **dict.fromkeys(_THREADS, "1")},
                start_new_session=True,  # its own group: Ctrl-C is the parent's to handle, and kill() gets all of it
            )
        ours.settimeout(30.0)  # a frame is small; only a worker that stopped reading could make us wait
        self.channel = ch.Channel(ours)
        self.poll = select.poll()  # to wait for this worker alone
        self.poll.register(ours.fileno(), select.POLLIN)
        self.running = False  # it has built its environments and has its rows
        self.pending = 0  # results that it owes
        self.last_mark = -1
        self.touch()
        with contextlib.suppress(ch.Closed):  # a worker that dies at once is found by its closed channel
            self.channel.send(ch.START, self._start)

    def touch(self) -> None:
        """Note a sign of life."""
        self.busy_since = time.monotonic()

    def dump_stacks(self) -> None:
        """Ask for the stacks of all its threads; works even while a C function holds the interpreter lock."""
        before = os.fstat(self._dump_fd).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        until = time.monotonic() + 1.0
        while os.fstat(self._dump_fd).st_size == before and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.05)  # the handler writes in several pieces

    def last_words(self) -> str:
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

    def release(self) -> None:
        """Close what belongs to a process that has ended."""
        self.channel.close()
        os.close(self._dump_fd)


def stop_workers(workers: list[WorkerHandle], memory_fd: int, owner_pid: int, patience_s: float = 5.0) -> None:
    """Let every worker close its environments, then end those that did not.

    A fork of the owner inherits this as a finalizer; the workers are not its to end.
    """
    if os.getpid() != owner_pid:
        return
    for worker in workers:
        with contextlib.suppress(ch.Closed, OSError):
            worker.channel.send(ch.CLOSE)
    until = time.monotonic() + patience_s
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, until - time.monotonic()))
        worker.kill()
        worker.release()
    workers.clear()
    os.close(memory_fd)
