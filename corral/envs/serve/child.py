"""The process in which `corral serve` runs its environments."""

from __future__ import annotations

import signal
import socket
import traceback

from corral.core.encoding import decode, encode
from corral.core.errors import EnvFailed, RunFailed, UserError
from corral.envs.resolve import resolve
from corral.envs.serve.server import SimulatorServer
from corral.envs.serve.supervisor import RequestClock, ServeJob
from corral.link.address import has_listener, parse_url
from corral.link.auth import read_token
from corral.link.transports.open import open_for_simulator
from corral.runtimes.shared_memory import SharedMemory

_MAX_TEXT = 1 << 14


def main(sock: socket.socket, job: SharedMemory, clock: SharedMemory) -> None:
    """Serve until the learner is done or SIGTERM arrives, then report how it ended; a crash reports nothing."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = {"error": "", "text": ""}
    try:
        _serve(ServeJob(**decode(job.read())), RequestClock(clock.map(RequestClock.SIZE)))
    except KeyboardInterrupt:
        pass
    except (UserError, EnvFailed, RunFailed) as error:
        report = {"error": type(error).__name__, "text": str(error)}
    except BaseException as error:
        report = {"error": "RunFailed", "text": "".join(traceback.format_exception(error))[-_MAX_TEXT:]}
    sock.sendall(b"".join(encode(report)))


def _serve(job: ServeJob, clock: RequestClock) -> None:
    token, address = read_token(job.token_file), parse_url(job.url)
    resolved = resolve(job.env, job.env_kwargs)
    while True:
        binding = open_for_simulator(address, token, bind=job.bind, insecure=job.insecure)
        try:
            server = SimulatorServer(
                resolved.factory, resolved.name, binding, job.envs, token, clock=clock, instance=job.instance
            )
        except Exception as error:
            binding.close()
            if isinstance(error, UserError):
                raise
            raise EnvFailed(
                f"{job.env} cannot be served: it raised {error!r} when it was built or first reset; "
                f"`corral check-env {job.env}` shows where."
            ) from error
        clock.begin(0.0)
        # Though told to listen, it may have connected to a learner that listened first; when that one is done, it
        # listens itself.
        is_gone = None if binding.listens or not job.bind else lambda: not has_listener(address)
        try:
            server.run(job.wait_s, is_gone)
        finally:
            server.close()
        if not job.bind:
            return
