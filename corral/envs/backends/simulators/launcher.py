"""Starts simulators, restarts them when they end, are too old or use too much memory, and leaves none behind.

Each runs in its own process group; its children in other groups are found by the mark in its environment. A simulator
is retired without interrupting episodes: another is started, the environments move there as their episodes end, and
then the old one is closed.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from corral.core.errors import EnvFailed, UserError
from corral.core.machine import Backoff, resident_bytes
from corral.link.auth import new_nonce
from corral.link.client.fleet import Fleet, FleetMember
from corral.link.client.session import SimulatorSession
from corral.runtimes.child import describe_exit
from corral.runtimes.orphan_reaper import OWN_GROUP, OrphanReaper
from corral.runtimes.portable_reaper import end_group, end_marked

log = logging.getLogger("corral.link")

_MARK = "CORRAL_INSTANCE"
_SECRET_BYTES = 12  # of 16
_MIN_LIFETIME_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_MAX_FAILED_STARTS = 5
_MEMORY_EVERY_S = 1.0
_END_S = 2.0  # to exit by itself, then to exit on SIGTERM
_FOREGROUND = " (it must not go to the background)"
_KILL_FACTOR = 2.0  # times the memory limit: it is ended without finishing its episodes


@dataclass(frozen=True)
class Recycling:
    """When a simulator is replaced by a fresh one; 0: never."""

    episodes: int = 0
    memory_mb: int = 0


@dataclass
class _SimulatorProcess:
    instance: bytes
    popen: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)
    session: SimulatorSession | None = None
    retiring: bool = False

    @property
    def mark(self) -> str:
        return f"{_MARK}={self.instance.hex()}"


class Launcher:
    """`count` simulators of one command, in which `{url}` stands for the address they connect to."""

    def __init__(self, command: str, count: int, url: str, fleet: Fleet, recycling: Recycling):
        if recycling.memory_mb and not resident_bytes():
            raise UserError("recycle_mb needs Linux, which tells how much memory a process uses: use recycle_episodes.")
        self._argv = _split(command, url)
        self._count, self._fleet, self._recycling = count, fleet, recycling
        self._processes: list[_SimulatorProcess] = []
        self._due: list[float] = [0.0] * count
        self._failed_starts, self._backoff = 0, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._memory_checked = time.monotonic()
        self._reaper = OrphanReaper()
        self._member = FleetMember(self._joined, lambda session, kind, reason: None)
        fleet.members.insert(0, self._member)
        fleet.periodic.append(self.check)
        fleet.gone = self.has_ended
        try:
            self.check(time.monotonic())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    def has_ended(self, instance: bytes) -> bool:
        return any(p.instance == instance and p.popen.poll() is not None for p in self._processes)

    def started(self, instance: bytes) -> bool:
        """Whether a process that was started here has this instance; one of several workers changes its end."""
        return any(hmac.compare_digest(p.instance[:_SECRET_BYTES], instance[:_SECRET_BYTES]) for p in self._processes)

    def check(self, now: float) -> None:
        """Start simulators that are due, clean up after ended ones, retire old ones."""
        for process in list(self._processes):
            if process.popen.poll() is not None:
                self._ended(process, now)
            elif process.session is not None and process.session.lost is not None:
                self._clean_up(process)  # given up: it hangs, or sends invalid messages
                self._plan(now)
        for due in [due for due in self._due if due <= now]:
            self._due.remove(due)
            self._start()
        self._retire(now)

    def close(self) -> None:
        """End all simulators; those that were told that the run is over exit by themselves."""
        if self._member in self._fleet.members:
            self._fleet.members.remove(self._member)
        self._due.clear()
        for timeout_s, end in ((_END_S, _ask_to_end), (_END_S, _kill)):
            until = time.monotonic() + timeout_s
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.popen.wait(max(0.0, until - time.monotonic()))
            for process in self._processes:
                if process.popen.poll() is None:
                    end(process.popen)
        for process in list(self._processes):
            self._clean_up(process)
        self._reaper.stop()

    def _start(self) -> None:
        instance = new_nonce()
        try:
            popen = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, env={**os.environ, _MARK: instance.hex()}, **OWN_GROUP
            )  # fmt: skip
        except OSError as error:
            raise UserError(
                f"The simulator {self._argv[0]} cannot be started: {error.strerror}; check --sim."
            ) from error
        process = _SimulatorProcess(instance, popen)
        self._reaper.watch(popen.pid)
        self._reaper.watch_marked(process.mark)
        self._processes.append(process)

    def _joined(self, session: SimulatorSession) -> None:
        for process in self._processes:
            if process.instance == session.simulator.hello.instance:
                process.session = session
                self._failed_starts = 0
                if not process.retiring:
                    self._backoff.reset()

    def _ended(self, process: _SimulatorProcess, now: float) -> None:
        code = process.popen.returncode
        self._clean_up(process)
        if process.retiring:
            return
        how = describe_exit(code) + (_FOREGROUND if code == 0 else "")
        log.warning("a simulator (process %d) exited with %s; starting another.", process.popen.pid, how)
        if process.session is None:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise EnvFailed(
                    f"The simulator {shlex.join(self._argv)} exited {self._failed_starts} times before it sent HELLO, "
                    f"the last time with {how}; run it by hand to see why."
                )
        self._plan(now, short_lived=now - process.started < _MIN_LIFETIME_S)

    def _plan(self, now: float, *, short_lived: bool = True) -> None:
        """Schedule a start, with growing pauses if simulators crash soon after starting."""
        if not short_lived:
            self._backoff.reset()
        self._due.append(now + self._backoff.next())

    def _retire(self, now: float) -> None:
        limit, most = self._recycling.memory_mb << 20, self._recycling.episodes
        weigh = limit and now - self._memory_checked > _MEMORY_EVERY_S
        if weigh:
            self._memory_checked = now
        for process in list(self._processes):
            session = process.session
            if session is None or session.lost is not None:
                continue
            memory = group_memory(process.popen.pid) if weigh else 0
            if process.retiring:
                if session.used_slots == 0:
                    self._fleet.dismiss(session)
                elif memory > _KILL_FACTOR * limit:
                    self._fleet.give_up(session, "killed", f"{session.name} uses {memory >> 20} MB")
            elif (most and session.episodes >= most) or memory > limit > 0:
                why = f"{session.episodes} episodes" if not weigh or memory <= limit else f"{memory >> 20} MB"
                log.info("%s is recycled after %s; starting another.", session.name, why)
                process.retiring = session.retiring = True
                self._due.append(now)

    def _clean_up(self, process: _SimulatorProcess) -> None:
        _kill(process.popen)
        process.popen.wait()
        end_marked(process.mark)
        self._reaper.unwatch(process.popen.pid)
        self._reaper.unwatch_marked(process.mark)
        self._processes.remove(process)


def _split(command: str, url: str) -> list[str]:
    try:
        # On Windows a backslash is a part of a path, and shlex then keeps quotation marks.
        windows = os.name == "nt"
        parts = [part.strip('"') if windows else part for part in shlex.split(command, posix=not windows)]
        argv = [part.replace("{url}", url) for part in parts]
    except ValueError as error:
        raise UserError(f"--sim {command!r} cannot be read as a command: {error}.") from error
    if not argv:
        raise UserError("--sim is empty: give the command that starts a simulator, with {url} for its address.")
    if "{url}" not in command:
        raise UserError(f"--sim {command!r} has no {{url}}, so the simulator would not know where to connect: add it.")
    return argv


def _ask_to_end(popen: subprocess.Popen[bytes]) -> None:
    # The group outlives its leader until we reap it, so the id cannot have been reused.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(popen.pid, signal.SIGTERM)
        else:
            popen.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))


def _kill(popen: subprocess.Popen[bytes]) -> None:
    end_group(popen.pid)
    popen.kill()


def group_memory(pid: int) -> int:
    """Resident bytes of a process and its descendants; 0 if unknown."""
    total, left = 0, [pid]
    while left:
        current = left.pop()
        total += resident_bytes(current)
        with contextlib.suppress(OSError):
            left += map(int, Path(f"/proc/{current}/task/{current}/children").read_text().split())
    return total
