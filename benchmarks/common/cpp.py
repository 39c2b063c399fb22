"""C++ simulators for benchmarks, compiled when needed against this repository's corral.hpp."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SDK = Path(__file__).parents[2] / "sdk" / "cpp"
_COMPILE_S = 600.0


class CannotCompile(Exception):
    """The simulator cannot be compiled; the message is one clause."""


def compile_simulator(source: Path, binary: Path) -> bool:
    """Compile one file; returns whether the program supports `zmq://`, for which pyzmq's libzmq is linked."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise CannotCompile("there is no C++ compiler")
    if not (SDK / "corral.hpp").exists():
        raise CannotCompile(f"{SDK / 'corral.hpp'} does not exist")
    library = _libzmq()
    with_zmq = ["-DCORRAL_ZMQ", str(library), f"-Wl,-rpath,{library.parent}"] if library else []
    args = ["-O2", "-std=c++17", f"-I{SDK}", str(source), *with_zmq, "-pthread", "-o", str(binary)]
    try:
        done = subprocess.run([compiler, *args], capture_output=True, text=True, timeout=_COMPILE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"the compiler failed ({type(error).__name__})") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise CannotCompile(f"the compiler failed ({first[:200]})")
    return library is not None


def _libzmq() -> Path | None:
    """The library in pyzmq's wheel."""
    import zmq

    found = sorted((Path(zmq.__file__).parents[1] / "pyzmq.libs").glob("libzmq*.so*"))
    return found[0] if found else None
