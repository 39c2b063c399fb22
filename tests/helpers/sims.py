"""Python simulators as processes of this machine, for any environment factory."""

import contextlib
import multiprocessing as mp
import os
import signal
import socket
import time

import cloudpickle

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["corral.envs.serve.server", "corral.testing", "corral.link.transports.zmq"])


def free_url(scheme="tcp"):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"{scheme}://127.0.0.1:{sock.getsockname()[1]}"


def wait_for(url):
    """Until somebody listens there."""
    host, port = url.partition("://")[2].split(":")
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens at {url}")


class Sim:
    """One simulator process. `bind`: it listens; otherwise it dials."""

    def __init__(self, factory, url, *, bind=False, slots=64, token_file=None, patience=60.0):
        job = cloudpickle.dumps((factory, url, bind, slots, token_file, patience))
        self._process = _context.Process(target=_run, args=(job, os.getpid()), daemon=True)
        self._process.start()

    @property
    def pid(self):
        return self._process.pid

    @property
    def exitcode(self):
        self._process.join(10)
        return self._process.exitcode

    @property
    def alive(self):
        return self._process.is_alive()

    def kill(self, how=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, how)

    def end(self):
        self.kill()
        self._process.join(10)


def _run(job, tests):
    from corral.envs.serve.server import SimulatorServer
    from corral.link.address import parse_url
    from corral.link.auth import read_token
    from corral.link.transports.open import open_for_simulator

    factory, url, bind, slots, token_file, patience = cloudpickle.loads(job)
    token = read_token(token_file)
    binding = open_for_simulator(parse_url(url), token, bind=bind)
    server = SimulatorServer(factory, "test", binding, slots, token)
    raise SystemExit(server.run(patience))
