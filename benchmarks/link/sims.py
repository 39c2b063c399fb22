"""Simulators for `python -m benchmarks link`: `noop.cpp`, compiled on the spot, or its double in Python."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.children import child_env
from benchmarks.common.cpp import CannotCompile, compile_simulator

_SOURCE = Path(__file__).with_name("noop.cpp")
_END_S = 5.0

SHAPES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "f4": (np.float32, (4,)),
    "f84": (np.float32, (84,)),
    "image": (np.uint8, (4, 84, 84)),
}
"""Observations by the name that simulators know them by: dtype and shape."""


@dataclass(frozen=True)
class Noop:
    """What was compiled."""

    binary: Path | None
    zmq: bool = False
    """Whether it knows libzmq."""
    why: str = ""
    """Why there is less than there could be."""

    def command(self, *args: str) -> list[str]:
        """How to start it, or its double in Python; the first word is `link`, `json` or `bytes`."""
        url = next((arg for arg in args if "://" in arg), "")
        if self.binary is None or (not self.zmq and (args[0] == "json" or url.startswith("zmq"))):
            return python_command(*args)
        return [str(self.binary), "--connect", *args[1:]] if args[0] == "link" else [str(self.binary), *args]

    def language(self, mode: str, url: str = "") -> str:
        """What the simulator that `command` starts is written in."""
        return "Python" if self.command(mode, url)[0] == sys.executable else "C++"


def python_command(*args: str) -> list[str]:
    """How to start a simulator in Python."""
    return [sys.executable, "-m", "benchmarks.link.peers", *args]


def compile_noop(folder: Path) -> Noop:
    """Compile `noop.cpp`."""
    binary = folder / "noop"
    try:
        with_zmq = compile_simulator(_SOURCE, binary)
    except CannotCompile as error:
        return Noop(None, why=f"{error}, so simulators are Python")
    why = "" if with_zmq else "pyzmq came without a libzmq to link, so simulators that use it are Python"
    return Noop(binary, with_zmq, why)


def free_port() -> int:
    """A free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class SimulatorProcess:
    """A simulator, ended with its parent."""

    def __init__(self, command: list[str], kind: str = "f4", **options: Any):
        self.popen: subprocess.Popen[str] = subprocess.Popen(
            command, env=child_env(CORRAL_NOOP=kind), text=True, **options
        )

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(0.5)  # by itself, as those over the link do
        self.popen.kill()
        self.popen.wait(_END_S)
