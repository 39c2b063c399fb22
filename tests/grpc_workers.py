"""Workers that dial a gRPC VecEnv, as processes of this machine, and environments that have no name of their own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import cloudpickle
import pytest

_FOR_EVER = """
import os, time
from corral.envs.grpc_wire import connect
from corral.envs.grpc_worker import work
from corral.core.errors import RunFailed, UserError
channel, tests = connect({address!r}), os.getppid()
while os.getppid() == tests:
    try:
        work(channel, {address!r}, 0.0)
    except (RunFailed, UserError):
        pass
    time.sleep(0.1)
"""


def free_address():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def start(*command, **env):
    """A process in a session of its own that can import what the tests can."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(
        [sys.executable, *command], env=env, start_new_session=True, stderr=subprocess.PIPE, text=True
    )


def start_join(address, workers=1, patience=20):
    return start("-m", "corral.cli.main", "join", address, "--workers", str(workers), "--patience", str(patience))


def end(process):
    """End a process, and for `corral join` its workers; what it said."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=15)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def patient_workers():
    """Where two workers dial in again and again, which saves the tests of a module from starting them."""
    address = free_address()
    processes = [start("-c", _FOR_EVER.format(address=address)) for _ in range(2)]
    yield address
    for process in processes:
        process.kill()
        process.communicate(timeout=15)


def build(factory):
    """An environment of the factory that `named` was given; the learner names this function."""
    return cloudpickle.loads(bytes.fromhex(factory))()


def named(factory):
    """Keyword arguments of `build`."""
    return {"factory": cloudpickle.dumps(factory).hex()}
