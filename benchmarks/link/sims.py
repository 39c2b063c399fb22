"""Simulators for `python -m benchmarks link`: `noop.cpp`, compiled when needed, or its Python equivalent."""

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
"""Observations by name: dtype and shape."""


@dataclass(frozen=True)
class Noop:
    """The compiled simulator, if there is one."""

    binary: Path | None
    zmq: bool = False
    """Whether it is linked with libzmq."""
    why: str = ""
    """Why some or all simulators are Python instead of C++."""

    def command(self, *args: str) -> list[str]:
        """The command that starts it, or its Python equivalent; the first argument is `link`, `json` or `bytes`."""
        url = next((arg for arg in args if "://" in arg), "")
        if self.binary is None or (not self.zmq and (args[0] == "json" or url.startswith("zmq"))):
            return python_command(*args)
        return [str(self.binary), "--connect", *args[1:]] if args[0] == "link" else [str(self.binary), *args]

    def language(self, mode: str, url: str = "") -> str:
        """Language of the simulator that `command` starts."""
        return "Python" if self.command(mode, url)[0] == sys.executable else "C++"


def python_command(*args: str) -> list[str]:
    """The command that starts a Python simulator."""
    return [sys.executable, "-m", "benchmarks.link.peers", *args]


def compile_noop(folder: Path) -> Noop:
    """Compile `noop.cpp`."""
    binary = folder / "noop"
    try:
        with_zmq = compile_simulator(_SOURCE, binary)
    except CannotCompile as error:
        return Noop(None, why=f"{error}, so simulators are Python")
    why = "" if with_zmq else "pyzmq has no libzmq to link, so simulators that use it are Python"
    return Noop(binary, with_zmq, why)


def free_port() -> int:
    """A free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class SimulatorProcess:
    """A running simulator."""

    def __init__(self, command: list[str], kind: str = "f4", **options: Any):
        self.popen: subprocess.Popen[str] = subprocess.Popen(
            command, env=child_env(CORRAL_NOOP=kind), text=True, **options
        )

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(0.5)  # simulators over the link end by themselves
        self.popen.kill()
        self.popen.wait(_END_S)
