"""What a measurement depends on and a reader must know: machine, versions, date."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata
from typing import Any

from corral.envs.auto import cores

_PACKAGES = ("corral-rl", "numpy", "gymnasium", "stable-baselines3", "envpool", "ale-py", "opencv-python-headless")


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
