"""Facts about this machine that decide how fast environments can be sampled, some of them measured."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from corral.core.machine import cores

_ECHO = """
import os, socket, sys
if sys.argv[2:]:
    os.sched_setaffinity(0, {int(sys.argv[2])})
with socket.socket(fileno=int(sys.argv[1])) as end:
    while end.recv(1):
        end.send(b"x")
"""
_COUNT = """
import sys, time
for line in sys.stdin:
    start, total = time.perf_counter(), 0
    for i in range(int(line)):
        total += i
    print(time.perf_counter() - start, flush=True)
"""
_PING_S = 0.2
_BUSY_S = 0.15
_ROUNDS = 3


@dataclass(frozen=True)
class Machine:
    """What was found; None where this system does not tell."""

    cores: int
    cores_present: int
    cpu_quota: float | None  # cores' worth of time that a container may use
    load: float | None  # how many cores other programs keep busy
    memory_total: int | None
    memory_free: int | None
    shm_bytes: int | None
    memfd: bool
    wake_up_s: float | None  # from one process's send to the other's return from its wait
    two_process_speedup: float | None


def look() -> Machine:
    """Look at this machine, and measure for about two seconds."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    total, free = _memory()
    return Machine(
        cores=cores(),
        cores_present=os.cpu_count() or 1,
        cpu_quota=_cpu_quota(),
        load=load,
        memory_total=total,
        memory_free=free,
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        memfd=hasattr(os, "memfd_create"),
        wake_up_s=measure_wake_up() if os.name == "posix" else None,
        two_process_speedup=measure_speedup(),
    )


def measure_wake_up() -> float:
    """Seconds that it takes to wake a process that waits for a message: half of a round trip, the median.

    The two processes stay on different cores, as a sampling process and its workers do while they work.
    """
    ours, theirs = socket.socketpair()
    with ours, _on_own_core() as other_core:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _ECHO, str(theirs.fileno()), *other_core], pass_fds=[theirs.fileno()]
            )
        with _ended(process):
            ours.settimeout(10.0)
            trips = []
            ours.send(b"x")
            ours.recv(1)  # it is up
            start = time.perf_counter()
            while time.perf_counter() - start < _PING_S:
                before = time.perf_counter()
                ours.send(b"x")
                ours.recv(1)
                trips.append(time.perf_counter() - before)
            ours.shutdown(socket.SHUT_RDWR)
    return statistics.median(trips) / 2


def measure_speedup() -> float:
    """How much more two busy processes get done than one; 2 on two cores that nobody else uses."""
    with _counter() as one, _counter() as other:
        count = int(200_000 * _BUSY_S / _time([one], 200_000))
        alone = min(_time([one], count) for _ in range(_ROUNDS))
        together = min(_time([one, other], count) for _ in range(_ROUNDS))
    return 2 * alone / together


@contextlib.contextmanager
def _on_own_core() -> Iterator[list[str]]:
    """Keep this thread on one core, and name another, where the system can do that."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(allowed) < 2:
        yield []
        return
    os.sched_setaffinity(0, {allowed[0]})
    try:
        yield [str(allowed[1])]
    finally:
        os.sched_setaffinity(0, allowed)


@contextlib.contextmanager
def _counter() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", _COUNT], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with _ended(process):
        yield process


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def _time(processes: list[subprocess.Popen[str]], count: int) -> float:
    """Let all of them count at once; seconds of the slowest."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
    return max(float(p.stdout.readline()) for p in processes if p.stdout is not None)


def _memory() -> tuple[int | None, int | None]:
    """Total and free bytes, within what the container allows."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None, None
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        return int(limit), min(free, int(limit) - int(used))
    return total, free


def _cpu_quota() -> float | None:
    quota, _, period = _cgroup("cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _cgroup(name: str) -> str:
    try:
        with open(f"/sys/fs/cgroup/{name}") as file:
            return file.read().strip()
    except OSError:
        return ""
