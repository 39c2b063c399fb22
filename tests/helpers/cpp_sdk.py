"""Builds the C++ SDK, for the tests that need its examples."""

import shutil
import subprocess
from pathlib import Path

import pytest
import zmq

SDK = Path(__file__).parents[2] / "sdk" / "cpp"
LIBZMQ = next(Path(zmq.__file__).parents[1].glob("pyzmq.libs/libzmq*.so*"), None)
NEEDS_ZMQ = pytest.mark.skipif(LIBZMQ is None, reason="this pyzmq has no libzmq of its own to build with")
EXAMPLES = ("cartpole", "connect4", "hybrid", "owned_loop", "pendulum")
SCHEMES = ("tcp", pytest.param("zmq", marks=NEEDS_ZMQ))


def run(*command, timeout=280):
    """What a command prints; it must succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def build(folder, *targets):
    """The programs named, or all, with zmq:// by the libzmq of the pyzmq wheel if there is one."""
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: the C++ SDK is not tested (apt-get install g++ cmake)")
    with_zmq = [] if LIBZMQ is None else ["-DCORRAL_ZMQ=ON", f"-DCORRAL_ZMQ_LIBRARY={LIBZMQ}"]
    run("cmake", "-S", SDK, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O0", *with_zmq)
    run("cmake", "--build", folder, "-j2", *(["--target", *targets] if targets else []))
    return folder
