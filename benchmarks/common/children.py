"""Child processes of benchmarks: their environment, and processes that answer line by line."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.deadline import TookTooLong

_ROOT = Path(__file__).parents[2]
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def child_env(**variables: str) -> dict[str, str]:
    """This process's environment, with the repository on the Python path and these variables."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **variables}


class ChildProcess:
    """A process that answers every line on its stdin with a line on its stdout, and is idle in between."""

    def __init__(self, command: Sequence[str], end_s: float, **options: Any):
        self._end_s, self._rest = end_s, b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, **options
        )

    def write_line(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `read_line` reports why the process ended
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def read_line(self, timeout_s: float) -> str:
        """The next line; TookTooLong if there is none in time, `failure` if the process has ended."""
        assert self._process.stdout is not None
        fd, until = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TookTooLong(f"no answer within {timeout_s:g} s")
            data = os.read(fd, 1 << 20)
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._end_s)
                self._errors.seek(0)
                raise failure(self._errors.read())
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        """Close its stdin, wait for its end, and kill it if it does not end in time."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._process.wait(self._end_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def failure(stderr: bytes) -> Exception:
    """Why a process failed: ModuleNotFoundError if it lacks a package, otherwise the last line of its stderr."""
    lines = stderr.decode(errors="replace").strip().splitlines() or ["nothing on stderr"]
    missing = next((found for line in reversed(lines) if (found := _MISSING.search(line))), None)
    return ModuleNotFoundError(missing[0], name=missing[1]) if missing else RuntimeError(lines[-1])
