"""The portable implementations on Linux: forced, and with what Windows lacks hidden from Corral."""

import os
from pathlib import Path

import pytest

from corral.core import portable

NO_LINUX = str(Path(__file__).parent / "no_linux")
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def forced(monkeypatch):
    """Force the portable implementations, in child processes too."""
    monkeypatch.setattr(portable, "PORTABLE", True)
    monkeypatch.setenv("CORRAL_PORTABLE", "1")


def portable_env(tmp_path, hidden=False):
    """Variables of a process that is forced to be portable, and whose temporary files are in `tmp_path`."""
    path = [NO_LINUX, ROOT] if hidden else [ROOT]
    env = {**os.environ, "CORRAL_PORTABLE": "1", "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path)}
    return env | {"CORRAL_NO_LINKS": "1"} if hidden else env
