"""A worker process: some environments, stepped on request, results in shared memory."""

from __future__ import annotations

import logging
import socket
from typing import Any

from corral.core.encoding import decode
from corral.core.types import EnvSpec
from corral.envs.backends.process.channel import Channel, ChannelClosed, frame
from corral.envs.backends.remote import messages as msg
from corral.envs.backends.remote.pickled import dump
from corral.envs.backends.remote.worker import EnvWorker, failure
from corral.envs.stepping.id_set import IdSet, SetCache
from corral.envs.stepping.rows import EnvRows
from corral.runtimes.shared_memory import SharedMemory


def main(sock: socket.socket, memory: SharedMemory, job: SharedMemory) -> None:
    """Serve one ProcessVecEnv until it sends CLOSE or disconnects."""
    logging.getLogger("corral").setLevel(logging.WARNING)  # the parent has said what importing the environment says
    logging.getLogger("corral").propagate = False  # printed as usual, even if a package sets up logging
    channel = Channel(sock)
    worker = _Worker(channel, memory)
    try:
        worker.start(job.read())
        while True:
            for op, payload in channel.read():
                if op == msg.CLOSE:
                    return
                worker.receive(op, payload)
    except ChannelClosed:
        pass
    except BaseException as error:
        channel.send(msg.FAILED, failure(error))
    finally:
        worker.close()


class _Worker(EnvWorker):
    def __init__(self, channel: Channel, memory: SharedMemory):
        self._channel, self._memory = channel, memory

    def receive(self, op: int, payload: bytes) -> None:
        if op == msg.STEP:
            self.step(self._sets.of_payload(payload))
        else:
            self.handle(op, decode(bytearray(payload)))

    def post(self, op: int, data: Any) -> None:
        self._channel.send(op, data)

    def announce(self, done: IdSet) -> None:
        if self._rows.infos is not None:
            self.post(msg.INFOS, dump(self._rows.infos.take(done.numbers), "an info"))
        ready = self._ready_frames.get(done)
        if ready is None:
            ready = self._ready_frames[done] = frame(msg.READY, done.payload)
        self._channel.send_frame(ready)

    def make_rows(self, spec: EnvSpec, num_envs: int) -> EnvRows:
        self._ready_frames = SetCache[bytes](num_envs)
        return EnvRows(spec, num_envs, self._memory.map(EnvRows.nbytes(spec, num_envs)))
