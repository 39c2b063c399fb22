"""`corral serve`: server processes that are replaced when their environments crash or hang.

The environments run in a child process, because one that segfaults or never returns takes its process down. Each
request has a deadline; the child writes it to memory that this process reads, so a hang is noticed even while C code
holds the interpreter lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from corral.core.encoding import DecodeError, decode, encode
from corral.core.errors import EnvFailed, RunFailed, UserError
from corral.core.machine import Backoff
from corral.link.auth import NONCE_BYTES, new_nonce
from corral.runtimes.child import ChildProcess, start_child
from corral.runtimes.orphan_reaper import OrphanReaper
from corral.runtimes.shared_memory import shared_memory

log = logging.getLogger("corral.envs")

INSTANCE = "CORRAL_INSTANCE"
_START_S = 120.0  # to import and build the environment
_GRACE_S = 1.0  # after the deadline of a request, at which the learner gives up
_SILENCE_S = 30.0  # between polls for messages, four per second
_CHECK_EVERY_S = 0.05
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_LONG_LIFE_S = 30.0
_MAX_FAILED_STARTS = 5
_OVER_S, _END_S = 1.0, 5.0
_MAX_REPORT_BYTES = 1 << 16
_ERRORS: dict[str, type[Exception]] = {error.__name__: error for error in (UserError, EnvFailed, RunFailed)}


@dataclass(frozen=True)
class ServeJob:
    """What a server process serves, and to which learners."""

    env: str
    env_kwargs: dict[str, Any]
    url: str
    bind: bool
    envs: int
    token_file: str | None = None
    insecure: bool = False
    wait_s: float = 0.0
    instance: bytes = b""  # id of the simulator; a replacement process keeps it, so that the learner need not wait


class RequestClock:
    """Deadline (monotonic clock) by which a server process must answer or poll, in memory that its parent reads."""

    SIZE = 16

    def __init__(self, shared: Any = None):
        memory = memoryview(bytearray(self.SIZE) if shared is None else shared)
        self._due, self._answered = memory[:8].cast("d"), memory[8:].cast("q")

    def begin(self, deadline_s: float) -> None:
        """A request must be answered within this many seconds; 0: no deadline."""
        self._due[0] = time.monotonic() + deadline_s if deadline_s else 0.0

    def end(self) -> None:
        self._due[0] = 0.0
        self._answered[0] += 1

    def wait(self, silence_s: float = _SILENCE_S) -> None:
        """The process waits for messages, and will call this again."""
        self._due[0] = time.monotonic() + silence_s

    def restart(self, deadline_s: float) -> None:
        self._answered[0] = 0
        self.begin(deadline_s)

    def overdue_s(self) -> float:
        """Seconds since the deadline; 0 before it."""
        due = self._due[0]
        return max(0.0, time.monotonic() - due) if due else 0.0

    @property
    def answered(self) -> int:
        return int(self._answered[0])


class _Server:
    def __init__(self, job: ServeJob, reaper: OrphanReaper):
        self._env, self._reaper = job.env, reaper
        self._job = shared_memory("corral-serve", b"".join(encode(asdict(job))))
        self._clock_memory = shared_memory("corral-clock")
        self._clock = RequestClock(self._clock_memory.create(RequestClock.SIZE))
        self._backoff, self._failed_starts = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), 0
        self._process: ChildProcess | None = None
        self._due = 0.0

    def check(self) -> bool:
        """Start or replace the process if due; True when the learner is done. Raises errors that it reports."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._due:
                self._start(now)
            return False
        if self._process.has_ended():
            report = self._read_report()
            self._process.kill()  # its leftovers
            if report is None:
                self._replace(f"ended with {self._process.ending}")
                return False
            if report["error"]:
                raise _ERRORS[report["error"]](report["text"])
            return True
        if self._clock.overdue_s() > _GRACE_S:
            self._process.dump_stacks()
            self._process.kill()
            self._replace("did not answer before its deadline")
        return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def close(self, until: float) -> None:
        if self._process is not None:
            self._process.wait(until)
            self._process.kill()
            self._process.close()
        self._job.close()
        self._clock_memory.close()

    def _start(self, now: float) -> None:
        self._clock.restart(_START_S)
        memories = self._job, self._clock_memory
        self._process, self._started = start_child("corral.envs.serve.child:main", memories, self._reaper), now

    def _replace(self, how: str) -> None:
        assert self._process is not None
        stacks = self._process.stacks
        self._process.close()
        self._process = None
        log.warning(
            "the process of %s %s; starting another%s", self._env, how, f". Its stack:\n{stacks}" if stacks else ""
        )
        self._failed_starts = 0 if self._clock.answered else self._failed_starts + 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            raise EnvFailed(
                f"The process of {self._env} failed {self._failed_starts} times before it had answered a request, the "
                f"last time it {how}; `corral check-env {self._env}` shows why."
            )
        now = time.monotonic()
        if now - self._started > _LONG_LIFE_S:
            self._backoff.reset()
        self._due = now + self._backoff.next()

    def _read_report(self) -> dict[str, Any] | None:
        assert self._process is not None
        self._process.socket.setblocking(False)
        try:
            report = decode(self._process.socket.recv(_MAX_REPORT_BYTES))
        except (OSError, DecodeError):
            return None
        return report if isinstance(report, dict) else None


def supervise(jobs: Sequence[ServeJob]) -> int:
    """Keep a server process for each job until the learner's run is over; returns the exit code."""
    reaper = OrphanReaper()
    servers: list[_Server] = []
    try:
        for number, job in enumerate(jobs):
            servers.append(_Server(replace(job, instance=_new_instance(number)), reaper))
        while not any(server.check() for server in servers):
            time.sleep(_CHECK_EVERY_S)
        _end_all(servers, _OVER_S)
        return 0
    finally:
        for server in servers:
            server.stop()
        _end_all(servers, _END_S)
        reaper.stop()


def _new_instance(number: int) -> bytes:
    """The id that a launcher gave to this command, whose other simulators differ in the last bytes; or a new one."""
    given = os.environ.get(INSTANCE, "")
    if len(given) != 2 * NONCE_BYTES:
        return new_nonce()
    first = bytes.fromhex(given)
    last = (int.from_bytes(first[-4:], "little") + number) % (1 << 32)
    return first[:-4] + last.to_bytes(4, "little")


def _end_all(servers: list[_Server], wait_s: float) -> None:
    until = time.monotonic() + wait_s
    while servers:
        with contextlib.suppress(OSError):
            servers.pop().close(until)
