"""A worker process: some environments, stepped on request, results in shared memory.

It starts as a fresh interpreter that imports neither torch nor the user's `__main__`, and it dies with its
parent, whatever kills the parent.
"""

from __future__ import annotations

import atexit
import faulthandler
import mmap
import os
import select
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

from corral.core.errors import EnvFailed, UserError
from corral.core.types import EnvSpec
from corral.envs.backends.process import channel as ch
from corral.envs.backends.remote.worker import EnvWorker
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.rows import EnvRows


def main(socket_fd: int, memory_fd: int, job_fd: int, dump_fd: int, parent_pid: int) -> None:
    """Serve one ProcessVecEnv until it says CLOSE or goes away."""
    for fd in (socket_fd, memory_fd, job_fd, dump_fd):
        os.set_inheritable(fd, False)  # what an environment starts has no business with these
    threading.Thread(target=end_with_parent, args=(socket_fd, parent_pid), daemon=True).start()
    dump = os.fdopen(dump_fd, "w")
    faulthandler.enable(dump)  # a segfault leaves its stack where the parent can read it
    faulthandler.register(signal.SIGUSR1, dump, all_threads=True)  # so does a hang, on request
    _serve(ch.Channel(socket.socket(fileno=socket_fd)), memory_fd, job_fd)
    leave()


def leave() -> NoReturn:
    """End this process, in which everything is closed.

    Taking the interpreter apart as well takes a while, and native libraries (ALE's) complain at length about what is
    left then.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(channel: ch.Channel, memory_fd: int, job_fd: int) -> None:
    worker = _Worker(channel, memory_fd)
    try:
        with open(job_fd, "rb", closefd=False) as file:
            file.seek(0)
            worker.start(file.read())
        while True:
            for op, payload in channel.read():
                if op == ch.CLOSE:
                    return
                worker.receive(op, payload)
    except ch.ChannelClosed:
        pass
    except UserError as error:
        channel.send_json(ch.FAILED, {"kind": "user", "text": str(error)})
    except EnvFailed as error:
        channel.send_json(ch.FAILED, {"kind": "failed", "text": str(error)})
    except BaseException as error:
        import traceback

        text = "".join(traceback.format_exception(error))
        channel.send_json(ch.FAILED, {"kind": "failed", "text": text})
    finally:
        worker.close()


class _Worker(EnvWorker):
    def __init__(self, channel: ch.Channel, memory_fd: int):
        self._channel, self._memory_fd = channel, memory_fd

    def receive(self, op: int, payload: bytes) -> None:
        if op == ch.STEP:
            self.step(self._sets.of_payload(payload))
        else:
            self.handle(op, ch.parse(payload))

    def post(self, op: int, data: Any) -> None:
        self._channel.send_json(op, data)

    def announce(self, done: IdSet) -> None:
        if done.route is None:
            done.route = ch.frame(ch.READY, done.payload)
        self._channel.send_frame(done.route)

    def make_rows(self, spec: EnvSpec, num_envs: int) -> EnvRows:
        return EnvRows(spec, num_envs, mmap.mmap(self._memory_fd, 0))


def end_with_parent(socket_fd: int, parent_pid: int) -> None:
    """End this process, and what it started, when the parent is gone.

    The parent's sentry does the same from outside, even while an environment keeps the interpreter lock; this
    thread looks at the parent's pid too, in case a fork of the parent holds its pipes open.
    """
    poll = select.poll()
    poll.register(socket_fd, 0)  # no event but hang-up and error, which are always reported
    while not poll.poll(1000) and os.getppid() == parent_pid:
        pass
    os.killpg(0, signal.SIGKILL)
