"""Running a benchmark as a user does."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common.children import child_env

COMMAND = [sys.executable, "-m", "benchmarks"]


def run(*args, **variables):
    return subprocess.run(
        [*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=280, env=child_env(**variables)
    )
