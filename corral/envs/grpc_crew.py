"""Worker processes of this machine for a learner elsewhere, started again when an environment takes one down."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from multiprocessing import spawn
from typing import Any

from corral.envs.grpc_session import GIVEN_UP
from corral.envs.grpc_wire import check_address
from corral.link.transports import grpc as rpc
from corral.runtimes.child import THREAD_VARIABLES
from corral.runtimes.orphan_reaper import OrphanReaper

log = logging.getLogger("corral.envs")

_BOOT = "import sys; sys.path[:] = {path!r}; from corral.envs.grpc_worker import main; main({args})"
_LOOK_S = 0.1
_LONG_LIFE_S = 30.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0
_END_S = 6.0


class _Member:
    """One worker process after the other."""

    def __init__(self, address: str, patience_s: float, sentry: OrphanReaper):
        self._args, self._sentry = (address, patience_s), sentry
        self._wait_s = _FIRST_WAIT_S
        self.process: subprocess.Popen[bytes] | None = None
        self.due: float | None = 0.0  # when to start, None when there will be no other

    def start(self) -> None:
        """Start a process of its own session: Ctrl-C is ours to handle, and `bury` gets all that it starts."""
        path = [entry for entry in sys.path if isinstance(entry, str)]
        executable: Any = spawn.get_executable()
        self.process = subprocess.Popen(
            [executable, "-c", _BOOT.format(path=path, args=", ".join(map(repr, self._args)))],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")},
            start_new_session=True,
        )
        self._sentry.watch(self.process.pid)
        self._started = time.monotonic()

    def poll(self) -> int | None:
        """Exit code of a process that has just ended, with what it had started."""
        if self.process is None or self.process.poll() is None:
            return None
        code = self.process.returncode
        self.bury()
        return code

    def plan_another(self) -> None:
        """Start again, later each time if they die young."""
        now = time.monotonic()
        young = now - self._started < _LONG_LIFE_S
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S) if young else _FIRST_WAIT_S
        self.due = now + self._wait_s

    def interrupt(self) -> None:
        """Ask the process to close its environments and end."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGINT)

    def bury(self) -> None:
        """End the process, and what it started."""
        if self.process is not None:
            # Where it has ended, the group is what it left behind.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._sentry.unwatch(self.process.pid)
        self.process = self.due = None


def join(address: str, workers: int, patience_s: float) -> int:
    """Run worker processes until the learner's run is over; returns the exit code.

    A process that dies is replaced; the learner counts, and ends its run when that happens too often.
    """
    rpc.import_grpc()
    check_address(address, "the learner's address")
    sentry = OrphanReaper()
    members = [_Member(address, patience_s, sentry) for _ in range(workers)]
    try:
        return _watch(members)
    finally:
        for member in members:
            member.interrupt()
        until = time.monotonic() + _END_S
        for member in members:
            if member.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    member.process.wait(max(0.0, until - time.monotonic()))
            member.bury()
        sentry.stop()


def _watch(members: list[_Member]) -> int:
    """Until the run is over (0), this machine does not fit (2), or no process finds a learner (1)."""
    while any(member.process or member.due is not None for member in members):
        for member in members:
            if member.process is None and member.due is not None and time.monotonic() >= member.due:
                member.start()
            code = member.poll()
            if code in (0, 2):
                _give_time(members)
                return code
            if code is not None and code != 1:
                how = "was given up" if code == GIVEN_UP else f"ended with {_describe(code)}"
                log.warning("a worker process %s; another takes its place", how)
                member.plan_another()
        time.sleep(_LOOK_S)
    return 1


def _give_time(members: list[_Member]) -> None:
    """The others hear of the end as well."""
    until = time.monotonic() + 1.0
    while any(member.process and member.process.poll() is None for member in members) and time.monotonic() < until:
        time.sleep(0.02)


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
