"""Memory and idle time of the machine, which Windows tells by function calls instead of files; None elsewhere."""

from __future__ import annotations

import ctypes
from typing import Any

_TICKS_PER_S = 10_000_000


class _MemoryStatus(ctypes.Structure):
    _fields_ = [
        ("length", ctypes.c_uint32),
        ("percent_used", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("page_file", ctypes.c_uint64 * 2),
        ("virtual", ctypes.c_uint64 * 3),
    ]


def memory_bytes() -> tuple[int, int] | None:
    """Bytes of the machine, and those that are free or can be freed."""
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if not _call("GlobalMemoryStatusEx", status):
        return None
    return status.total, status.available


def idle_s() -> float | None:
    """Seconds that the cores were idle since the machine started, summed over all cores."""
    idle, kernel, user = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    if not _call("GetSystemTimes", idle, kernel, user):
        return None
    return idle.value / _TICKS_PER_S


def _call(function: str, *results: Any) -> bool:
    windll: Any = getattr(ctypes, "windll", None)
    return windll is not None and bool(getattr(windll.kernel32, function)(*map(ctypes.byref, results)))
