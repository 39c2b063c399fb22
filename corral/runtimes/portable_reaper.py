"""The portable orphan reaper: run as a file, with Python's own library alone, beside a process that starts others.

It reads orders from its parent. When the parent is gone, however it ended, it kills the parent's child processes and
removes its shared memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


def end_group(pid: int) -> None:
    """Kill a process and what it started: its group or, on Windows, its descendants."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    else:
        with contextlib.suppress(OSError):
            quiet = subprocess.DEVNULL
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(pid)], stdin=quiet, stdout=quiet, stderr=quiet)


def main() -> None:
    """Follow orders until the parent is gone."""
    groups, files = set[int](), set[str]()
    for line in sys.stdin:
        order, _, word = line.rstrip("\n").partition(" ")
        if order == "guard":
            groups.add(int(word))
        elif order == "release":
            groups.discard(int(word))
        elif order == "file":
            files.add(word)
        elif order == "stop":
            return
    for group in groups:
        end_group(group)
    for path in files:
        with contextlib.suppress(OSError):
            os.unlink(path)


if __name__ == "__main__":
    main()
