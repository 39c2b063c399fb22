"""Ends worker processes, and what they started, when this process is gone, however it ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

from corral.core import portable
from corral.runtimes import portable_reaper

OWN_GROUP: dict[str, Any] = {
    "start_new_session": True,
    "creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
}
"""Arguments of `Popen` for a child that Ctrl-C does not reach, and that can be killed together with what it starts."""

CHILD = "CORRAL_CHILD"
"""Variable with a child's mark, which everything that it starts inherits."""

# The kernel closes our end of the pipe when we die; then `read` fails and the remaining groups are killed. A shell,
# because it shares nothing with a hanging Python and starts in a millisecond. Processes that have left their group are
# found by a mark in their environment.
_SCRIPT = """
groups=" "
marks=" "
while read -r order group; do
  case $order in
    guard) groups="$groups$group ";;
    release) groups="${groups%% "$group" *} ${groups#* "$group" }";;
    mark) marks="$marks$group ";;
    unmark) marks="${marks%% "$group" *} ${marks#* "$group" }";;
    stop) exit 0;;
  esac
done
for group in $groups; do kill -s KILL -- "-$group" 2>/dev/null; done
for mark in $marks; do
  for found in $(grep -lsaF -e "$mark" /proc/[0-9]*/environ); do
    found=${found#/proc/}
    kill -s KILL "${found%/environ}" 2>/dev/null
  done
done
"""


class OrphanReaper:
    """A separate process that waits for the end of this one: a shell, or Python where there is none."""

    def __init__(self) -> None:
        python = [sys.executable, "-I", "-S", os.path.abspath(portable_reaper.__file__)]
        self._process = subprocess.Popen(
            python if portable.PORTABLE else ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=os.sep,
            # Without the mark of this process, with which it would end before its work is done.
            env={name: value for name, value in os.environ.items() if name != CHILD}, **OWN_GROUP,
        )  # fmt: skip

    def watch(self, group: int) -> None:
        self._send(f"guard {group}")

    def unwatch(self, group: int) -> None:
        self._send(f"release {group}")

    def watch_file(self, path: str) -> None:
        """Remove this file, too, when this process is gone; the shell has none to remove."""
        self._send(f"file {path}")

    def watch_marked(self, mark: str) -> None:
        """Kill every process with this word (no blanks) in its environment when this process is gone; Linux only."""
        self._send(f"mark {mark}")

    def unwatch_marked(self, mark: str) -> None:
        self._send(f"unmark {mark}")

    def stop(self) -> None:
        self._send("stop")
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()

    def _send(self, order: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone, or was stopped
            os.write(self._process.stdin.fileno(), f"{order}\n".encode())
