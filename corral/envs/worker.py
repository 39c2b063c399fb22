"""A worker process: some environments, stepped on request, results in shared memory.

It starts as a fresh interpreter that imports neither torch nor the user's `__main__`, and it dies with its
parent, whatever kills the parent.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import mmap
import os
import random
import select
import signal
import socket
import threading
import time
from typing import Any, BinaryIO

import cloudpickle
import numpy as np

from corral import seeding
from corral.envs import channel as ch
from corral.envs.generators import read_global_generators, write_global_generators
from corral.envs.group import EnvGroup
from corral.envs.id_set import IdSet, IdSets
from corral.envs.rows import Rows
from corral.envs.supervise import IDLE, Fault
from corral.errors import EnvFailed, UserError
from corral.types import EnvSpec


def main(socket_fd: int, memory_fd: int, job_fd: int, dump_fd: int, parent_pid: int) -> None:
    """Serve one ProcessVecEnv until it says CLOSE or goes away."""
    for fd in (socket_fd, memory_fd, job_fd, dump_fd):
        os.set_inheritable(fd, False)  # what an environment starts has no business with these
    threading.Thread(target=end_with_parent, args=(socket_fd, parent_pid), daemon=True).start()
    dump = os.fdopen(dump_fd, "w")
    faulthandler.enable(dump)  # a segfault leaves its stack where the parent can read it
    faulthandler.register(signal.SIGUSR1, dump, all_threads=True)  # so does a hang, on request
    channel = ch.Channel(socket.socket(fileno=socket_fd))
    worker = _Worker(channel, memory_fd)
    try:
        with open(job_fd, "rb", closefd=False) as file:
            file.seek(0)
            worker.start(file)
        while True:
            for op, payload in channel.read():
                if op == ch.CLOSE:
                    return
                worker.handle(op, payload)
    except ch.Closed:
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


class _Worker:
    def __init__(self, channel: ch.Channel, memory_fd: int):
        self._channel, self._memory_fd = channel, memory_fd
        self._group: EnvGroup | None = None
        self._said_alive = 0.0

    def handle(self, op: int, payload: bytes) -> None:
        if op == ch.STEP:
            assert self._group is not None
            self._group.step(self._sets.of_payload(payload), self._announce)
        elif op == ch.RESET:
            self._reset(json.loads(payload))
        elif op == ch.ROWS:
            self._attach(json.loads(payload))
        elif op == ch.RECORD:
            assert self._group is not None
            self._group.record()
        elif op == ch.SAVE:
            assert self._group is not None
            self._channel.send_json(ch.SAVED, {"envs": self._group.save(), "generators": read_global_generators()})
        elif op == ch.LOAD:
            self._load(ch.parse(payload))

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def start(self, job: BinaryIO) -> None:
        # Pickle is safe here: the bytes come from the process that started this one, in memory of its own, and
        # a factory is code, which no data format carries.
        factories, name = cloudpickle.load(job)
        self._mark: Any = [IDLE]
        self._group = EnvGroup(factories, name, self._report, self._mark)
        self._channel.send_json(ch.SPEC, self._group.build().to_json())

    def _attach(self, data: dict[str, Any]) -> None:
        assert self._group is not None
        rows = Rows(EnvSpec.from_json(data["spec"]), data["num_envs"], mmap.mmap(self._memory_fd, 0))
        self._index = data["worker"]
        mark: Any = memoryview(rows.mark.data)[self._index : self._index + 1]
        self._sets = IdSets(rows.num_envs)
        self._group.attach(rows, self._sets, mark)
        if data["record"]:
            self._group.record()
        # Everything built so far lives as long as the worker; collections need not look at it.
        gc.collect()
        gc.freeze()

    def _reset(self, data: dict[str, Any]) -> None:
        assert self._group is not None
        if data["generators"] is not None:
            self._seed_generators(data["seed"], data["role"], data["generators"])
        chosen = self._sets.of(np.array(data["ids"]))
        self._group.reset(chosen.ids, data["seed"], data["role"], lenient=data["lenient"])
        self._announce(chosen)

    def _load(self, data: dict[str, Any]) -> None:
        assert self._group is not None
        self._seed_generators(data["seed"], data["role"], data["start"])
        restarted = self._group.load(data["envs"], data["seed"], data["role"], self._say_alive)
        if data["generators"] is not None:
            write_global_generators(data["generators"])
        self._channel.send_json(ch.LOADED, restarted)

    def _say_alive(self) -> None:
        """Once a second: repeating an episode may take longer than a step is allowed to."""
        now = time.monotonic()
        if now - self._said_alive > 1.0:
            self._said_alive = now
            self._channel.send(ch.ALIVE)

    def _seed_generators(self, run_seed: int, role: str, start: int) -> None:
        seed = seeding.worker_seed(run_seed, role, self._index, start)
        random.seed(seed)
        np.random.seed(seed)

    def _announce(self, done: IdSet) -> None:
        if done.route is None:
            done.route = ch.frame(ch.READY, done.payload)
        self._channel.send_frame(done.route)

    def _report(self, fault: Fault) -> None:
        self._channel.send_json(ch.FAULT, fault.to_json())


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
