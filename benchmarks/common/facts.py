"""Facts that a measurement depends on: machine, versions, date, and the CPU use of other programs."""

from __future__ import annotations

import datetime
import os
import platform
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from corral.core.machine import cores

_PACKAGES = (
    "corral-rl", "torch", "numpy", "gymnasium", "stable-baselines3", "envpool", "ale-py", "ray", "sample-factory",
    "opencv-python-headless",
)  # fmt: skip


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since some start: wall clock, CPU time of all processes, CPU time of this process and its children."""

    wall: float
    total: float
    ours: float

    @classmethod
    def now(cls) -> CpuTimes | None:
        """The current times, None if the system does not report them; children count once they have ended."""
        try:
            with open("/proc/stat") as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        busy = sum(ticks) - ticks[3] - ticks[4]  # without idle and iowait
        return cls(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]))

    def others_since(self, before: CpuTimes) -> float:
        """Fraction of the machine's CPU time that other programs used in between."""
        others = (self.total - before.total) - (self.ours - before.ours)
        return max(0.0, others / (self.wall - before.wall) / (os.cpu_count() or 1))


def facts() -> dict[str, Any]:
    """Machine, versions and date, JSON-ready."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
