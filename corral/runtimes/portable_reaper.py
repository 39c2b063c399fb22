"""The portable orphan reaper: run as a file, with Python's own library alone, beside a process that starts others.

It reads orders from its parent. When the parent is gone, however it ended, it kills the parent's child processes and
removes its shared memory.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys

_MAX_SWEEPS = 10


def end_group(pid: int) -> None:
    """Kill a process and what it started: its group or, on Windows, its descendants."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    else:
        with contextlib.suppress(OSError):
            quiet = subprocess.DEVNULL
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(pid)], stdin=quiet, stdout=quiet, stderr=quiet)


def end_marked(mark: str) -> None:
    """Kill all processes with this word in their environment: daemons and new sessions leave the process group.

    They are found on Linux and macOS only.
    """
    for _ in range(_MAX_SWEEPS):  # they may be starting others
        found = [pid for pid in _marked(mark) if pid != os.getpid()]
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _marked(mark: str) -> list[int]:
    if sys.platform == "darwin":
        command = ["ps", "-A", "-ww", "-E", "-o", "pid=,command="]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5)
            return [int(line.split()[0]) for line in listed.stdout.splitlines() if mark in line.split()]
        return []
    found, word = [], mark.encode()
    for path in glob.iglob("/proc/[0-9]*/environ"):  # none without /proc
        with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
            if word in file.read().split(b"\0"):
                found.append(int(path.split("/")[2]))
    return found


def main() -> None:
    """Follow orders until the parent is gone."""
    groups, files, marks = set[int](), set[str](), set[str]()
    for line in sys.stdin:
        order, _, word = line.rstrip("\n").partition(" ")
        if order == "guard":
            groups.add(int(word))
        elif order == "release":
            groups.discard(int(word))
        elif order == "file":
            files.add(word)
        elif order == "mark":
            marks.add(word)
        elif order == "unmark":
            marks.discard(word)
        elif order == "stop":
            return
    for group in groups:
        end_group(group)
    for mark in marks:
        end_marked(mark)
    for path in files:
        with contextlib.suppress(OSError):
            os.unlink(path)


if __name__ == "__main__":
    main()
