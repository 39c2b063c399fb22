"""Another library that trains in its own processes and has no way to pause: it is stopped between slices.

It is a script that prints lines of `steps seconds`: the number of steps so far, and the time (`time.monotonic()`, the
same clock in all processes of a machine). The script leads a session to which all processes that it starts belong;
SIGSTOP and SIGCONT to all of them pause and resume the library without its noticing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.children import failure
from benchmarks.common.deadline import TookTooLong
from benchmarks.common.rounds import Slice
from corral.runtimes.orphan_reaper import OrphanReaper

BUILD_S = 300.0
"""Timeout of the first report; on two busy cores RLlib takes minutes until its first samples arrive."""
_ANSWER_S = 120.0
_END_S = 10.0
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class FreeRunning:
    """A running script, stopped unless a slice is being measured."""

    def __init__(self, script: Path, *args: str, python: str = sys.executable):
        self._folder = tempfile.TemporaryDirectory(prefix="corral-bench-", ignore_cleanup_errors=True)
        self._errors = Path(self._folder.name) / "stderr"
        self._reaper, self._guarded = OrphanReaper(), set[int]()
        self._rest = b""
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, "-W", "ignore", str(script), *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=errors, cwd=self._folder.name, start_new_session=True, env=_environment(),
            )  # fmt: skip
        self._guard([(self._process.pid, self._process.pid)])
        try:
            self._await_line(time.monotonic() + BUILD_S)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def run(self, seconds: float) -> Slice:
        """Resume, wait for the first report, count steps from there, and stop."""
        self._signal(signal.SIGCONT)
        resumed = time.monotonic()
        try:
            until = resumed + _ANSWER_S + seconds
            steps, start = self._await_line(until, after=resumed)
            then, end = self._await_line(until, after=start + seconds)
        finally:
            self._signal(signal.SIGSTOP)
        return Slice(then - steps, end - start)

    def close(self) -> None:
        """Kill the whole session and wait for it, so that its CPU time counts as ours."""
        until = time.monotonic() + _END_S
        with _adopting_orphans():
            while (members := _session(self._process.pid)) and time.monotonic() < until:
                for pid, _ in members:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    if pid != self._process.pid:  # we become their parent one generation after the other
                        with contextlib.suppress(ChildProcessError):
                            os.waitpid(pid, os.WNOHANG)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.01)
        for group in self._guarded:
            self._reaper.unwatch(group)
        self._reaper.stop()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        members = _session(self._process.pid)
        self._guard(members)
        for pid, _ in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _guard(self, members: Sequence[tuple[int, int]]) -> None:
        """Have the orphan reaper end these processes if we die: stopped processes cannot notice it themselves."""
        for group in {group for _, group in members} - self._guarded:
            self._reaper.watch(group)
            self._guarded.add(group)

    def _await_line(self, until: float, after: float = 0.0) -> tuple[int, float]:
        """Steps and time of the first report that is later than `after`."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                steps, at = line.split()
                if float(at) >= after:
                    return int(steps), float(at)
                continue
            left = until - time.monotonic()
            if left <= 0:
                raise TookTooLong("no report of steps in time")
            if select.select([fd], [], [], left)[0]:
                data = os.read(fd, 1 << 16)
                if not data:
                    raise failure(self._errors.read_bytes())
                self._rest += data


def _session(leader: int) -> list[tuple[int, int]]:
    """Process and group ids of all processes in a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, group, session = path.read_text().rpartition(")")[2].split()[1:4]
            if int(session) == leader:
                found.append((int(path.parent.name), int(group)))
    return found


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of processes whose parents end meanwhile, so that we can wait for them."""
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *args: None)
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


def _environment() -> dict[str, str]:
    """One thread per process, which is fastest for small networks, and no PYTHONPATH of this process."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return given | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_ADDRESS": "local"}
