"""Cores and memory available to this process, and pauses between attempts."""

from __future__ import annotations

import os
import random
import statistics
import time
from pathlib import Path

from corral.core import windows
from corral.core.errors import UserError


def cores() -> int:
    """Cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CpuMeter:
    """How many cores other processes leave to this one, between two calls of `free`."""

    def __init__(self) -> None:
        self._last = self._read()

    def free(self) -> float | None:
        """Mean number of cores since the last call that were idle or used by this process; None if unknown."""
        last, self._last = self._last, self._read()
        if last is None or self._last is None or self._last[1] <= last[1]:
            return None
        return min(float(cores()), max(0.0, (self._last[0] - last[0]) / (self._last[1] - last[1])))

    def _read(self) -> tuple[float, float] | None:
        """Idle seconds of the available cores and CPU seconds of this process, and the time."""
        try:
            lines = Path("/proc/stat").read_text().splitlines()
            own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            fields = [fields for line in lines if (fields := line.split()) and fields[0] in own]
            idle = sum(int(values[4]) + int(values[5]) for values in fields) / os.sysconf("SC_CLK_TCK")
        except (OSError, AttributeError, ValueError, IndexError):  # not Linux
            if (elsewhere := windows.idle_s()) is None:
                return None
            idle = elsewhere
        return idle + time.process_time(), time.monotonic()


def free_cores(windows: int = 5, window_s: float = 0.05) -> float:
    """Cores that other processes leave to this one: the median of short windows, in which this process sleeps."""
    meter, found = CpuMeter(), list[float]()
    for _ in range(windows):
        time.sleep(window_s)
        free = meter.free()
        if free is None:  # by the load average, where there is one
            load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
            return max(0.0, cores() - load)
        found.append(free)
    return statistics.median(found)


class Backoff:
    """Pauses between attempts: each twice as long as the one before, up to a maximum. `jitter` is the random share of a
    pause, so that many processes do not retry at the same moment.
    """

    def __init__(self, first_s: float, longest_s: float, jitter: float = 0.0):
        self._first_s, self._longest_s, self._jitter = first_s, longest_s, jitter
        self._next_s = first_s

    def next(self) -> float:
        pause, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause * random.uniform(1.0 - self._jitter, 1.0)

    def reset(self) -> None:
        self._next_s = self._first_s


_CGROUP_LIMITS = (  # limit and use of a container, in bytes
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int | None:
    """Memory that is free or can be freed, within the container's limit; None if unknown."""
    found = [_machine()]
    for limit, use in _CGROUP_LIMITS:
        allowed, used = _number(limit), _number(use)
        if allowed is not None and used is not None:
            found.append(max(0, allowed - used))
    return min((number for number in found if number is not None), default=None)


def require_memory(needed: int, capacity: int, what: str, unit: str = "transitions") -> None:
    """UserError if `needed` bytes will not fit."""
    available = available_bytes()
    if available is not None and needed > available:
        fits = max(1, int(capacity * 0.9 * available / needed))
        raise UserError(
            f"{what} for {capacity:,} {unit} takes {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are free: "
            f"lower buffer_size to {fits:,} or less."
        )


def require_processes(count: int, each: int, what: str) -> None:
    """UserError if so many processes, which take at least `each` bytes, will not fit into memory."""
    available = available_bytes()
    if available is not None and count * each > available:
        raise UserError(
            f"{what} takes at least {count * each / 1e9:.0f} GB, and {available / 1e9:.1f} GB are free: ask for at "
            f"most {max(1, available // each):,} processes."
        )


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process on this machine; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, AttributeError):  # no /proc, or no sysconf
        return 0


def _machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    found = windows.memory_bytes()
    return total_bytes() if found is None else found[1]


def total_bytes() -> int | None:
    """Memory of this machine, without regard to a container's limit; None if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        found = windows.memory_bytes()
        return None if found is None else found[0]


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
