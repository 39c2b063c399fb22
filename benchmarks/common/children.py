"""The environment of child processes that import `benchmarks`, whatever folder the parent was started in."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def child_env(**variables: str) -> dict[str, str]:
    """This process's environment, with the repository on the path and these variables."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **variables}
