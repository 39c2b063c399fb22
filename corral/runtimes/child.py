"""Child processes: fresh interpreters with a socket to their parent, which exit with it and leave a stack dump.

Roles, environment workers and `corral serve` are all started here. A child imports neither torch nor the user's
`__main__`, runs in its own session (the parent handles Ctrl-C, and one signal reaches everything the child starts), and
ends with its parent, however that ends. `portable_child` does the same on other systems than Linux.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from multiprocessing import spawn
from typing import Any, NoReturn

from corral.core import portable
from corral.runtimes.orphan_reaper import CHILD, OWN_GROUP, OrphanReaper
from corral.runtimes.portable_reaper import end_marked
from corral.runtimes.shared_memory import Memfd, SharedMemory

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
_BOOT = "import sys; sys.path[:] = {path!r}; from corral.runtimes.child import run; run{args!r}"
_STACK_BYTES = 1 << 16


def start_child(target: str, memories: Sequence[SharedMemory], reaper: OrphanReaper) -> ChildProcess:
    """Start a child: `target` is `module:function`, called there with its socket and these memories."""
    if portable.PORTABLE:
        from corral.runtimes.portable_child import PortableChild

        return PortableChild(target, memories, reaper)
    return ChildProcess(target, memories, reaper)


def executable() -> Any:
    """The interpreter that runs children."""
    return spawn.get_executable()


def plug_stdio() -> None:
    """Open /dev/null for closed standard streams; otherwise shared memory could get their numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


class ChildProcess:
    """The parent's side.

    Numeric libraries start with one thread there: there are many processes, and each would otherwise use every core.
    """

    def __init__(self, target: str, memories: Sequence[SharedMemory], reaper: OrphanReaper):
        plug_stdio()
        self.socket, theirs = socket.socketpair()
        self._dump_fd, self._reaper = os.memfd_create("corral-stacks"), reaper
        fds = [memory.token for memory in memories if isinstance(memory, Memfd)]
        shared = theirs.fileno(), self._dump_fd, *fds
        path = [entry for entry in sys.path if isinstance(entry, str)]
        with theirs:
            self._process = subprocess.Popen(
                [executable(), "-c", _BOOT.format(path=path, args=(target, os.getpid(), *shared))],
                pass_fds=shared,
                stdin=subprocess.DEVNULL,
                env=self._environ(),
                **OWN_GROUP,
            )
        reaper.watch(self.pid)

    def _environ(self) -> dict[str, str]:
        """The child's environment, with a mark by which processes are found that leave its group."""
        name, value = CHILD, uuid.uuid4().hex
        self._mark = f"{name}={value}"
        self._reaper.watch_marked(self._mark)
        return {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), name: value}

    def _end_marked(self) -> None:
        """Kill what it has started in sessions of their own, and no longer look for it."""
        end_marked(self._mark)
        self._reaper.unwatch_marked(self._mark)

    @property
    def pid(self) -> int:
        """Id of the process and of its group."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether it has ended by itself. It is not reaped, so that the id of its group cannot be reused."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, until: float) -> bool:
        """Wait for it to end by itself until this time of the monotonic clock; returns whether it has."""
        while not (ended := self.has_ended()) and time.monotonic() < until:
            time.sleep(0.005)
        return ended

    def terminate(self) -> None:
        """Ask it to stop, as SIGTERM does."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        # The group outlives its leader until that is reaped, so its id cannot have been reused.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._reaper.unwatch(self.pid)
            self._end_marked()

    @property
    def ending(self) -> str:
        return describe_exit(self._process.returncode)

    def dump_stacks(self) -> None:
        """Request the stacks of all its threads; on Linux even while C code holds the interpreter lock."""
        before = os.fstat(self._dump_fd).st_size
        self._request_dump()
        until = time.monotonic() + 1.0
        while os.fstat(self._dump_fd).st_size == before and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.05)  # the handler writes in several pieces

    def _request_dump(self) -> None:
        self._signal(signal.SIGUSR1)

    @property
    def stacks(self) -> str:
        """Its stacks, as far as it was asked for them or has crashed."""
        return os.pread(self._dump_fd, _STACK_BYTES, 0).decode(errors="replace")

    def close(self) -> None:
        self.socket.close()
        os.close(self._dump_fd)


def describe_exit(code: int | None) -> str:
    """How a process ended, from its return code."""
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}" if code is None or code < 1 << 31 else f"exit code 0x{code:08X}"  # an error of Windows


def run(target: str, parent_pid: int, socket_fd: int, dump_fd: int, *fds: int) -> NoReturn:
    """The child's side."""
    for fd in (socket_fd, dump_fd, *fds):
        os.set_inheritable(fd, False)  # its own children must not inherit these
    threading.Thread(target=_end_with_parent, args=(socket_fd, parent_pid), daemon=True).start()
    dump = os.fdopen(dump_fd, "w")
    faulthandler.enable(dump)  # a segfault leaves its stack where the parent can read it
    faulthandler.register(signal.SIGUSR1, dump, all_threads=True)  # so does a hang, on request
    serve_parent(target, socket.socket(fileno=socket_fd), [Memfd(fd) for fd in fds])


def serve_parent(target: str, sock: socket.socket, memories: Sequence[SharedMemory]) -> NoReturn:
    """Call the child's function, then end."""
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(sock, *memories)
    # Everything is closed. Finalizing the interpreter takes a while, and native libraries (ALE's) print complaints.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent(socket_fd: int, parent_pid: int) -> None:
    """End this process, and what it started, when the parent is gone.

    The parent's reaper does the same from outside, even while an environment holds the interpreter lock; this thread
    also checks the parent's pid, in case a fork of the parent holds its pipes open.
    """
    poll = select.poll()
    poll.register(socket_fd, 0)  # only hang-up and error, which are always reported
    while not poll.poll(1000) and os.getppid() == parent_pid:
        pass
    os.killpg(0, signal.SIGKILL)
