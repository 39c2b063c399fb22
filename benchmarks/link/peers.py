"""Other ways to step a simulator in another process, as users write them, and the Python simulators for them.

`python -m benchmarks.link.peers link URL`, `json URL`, `grpc PORT` and `bytes PORT IN OUT` are the simulators.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent import futures
from functools import cache
from typing import Any

import gymnasium
import numpy as np

from benchmarks.link.sims import SHAPES, Noop, SimulatorProcess, free_port, python_command
from corral.core.errors import UserError
from corral.core.types import Array

_TIMEOUT_S = 120.0
_ALONE_S = 600.0  # a simulator without a learner ends after this
_THREADS = 10  # of a gRPC server, as in gRPC's own examples


class Results:
    """The results of a step, as arrays for a learner."""

    def __init__(self, num_envs: int):
        self.obs = np.zeros((num_envs, 4), np.float32)
        self.reward = np.zeros(num_envs)
        self.terminated, self.truncated = np.zeros(num_envs, np.bool_), np.zeros(num_envs, np.bool_)


class ReqRep(Results):
    """A REQ socket per simulator, with JSON messages for one environment each."""

    def __init__(self, num_envs: int, simulators: int, command: Callable[..., list[str]]):
        import zmq

        super().__init__(num_envs)
        self._context = zmq.Context()
        self._sockets, self._processes = list[Any](), list[SimulatorProcess]()
        for _ in range(simulators):
            url = f"tcp://127.0.0.1:{free_port()}"
            self._processes.append(SimulatorProcess(command("json", url)))
            self._sockets.append(self._context.socket(zmq.REQ))
            self._sockets[-1].setsockopt(zmq.RCVTIMEO, int(1000 * _TIMEOUT_S))
            self._sockets[-1].setsockopt(zmq.LINGER, 0)
            self._sockets[-1].connect(url)

    def step(self, actions: Array) -> None:
        """Send one message to each simulator, then receive their answers; repeat for all environments."""
        each, wanted = len(self._sockets), actions.tolist()
        for first in range(0, len(wanted), each):
            for env in range(first, first + each):
                self._sockets[env - first].send_json({"env": env, "action": wanted[env]})
            for env in range(first, first + each):
                reply = self._sockets[env - first].recv_json()
                self.obs[env] = reply["obs"]
                self.reward[env] = reply["reward"]
                self.terminated[env], self.truncated[env] = reply["terminated"], reply["truncated"]

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._context.term()
        for process in self._processes:
            process.close()


class GrpcUnary(Results):
    """A unary gRPC call with protobuf messages, one environment per call."""

    def __init__(self, num_envs: int):
        import grpc

        super().__init__(num_envs)
        self._request, reply = _messages()
        port = free_port()
        self._process = SimulatorProcess(python_command("grpc", str(port)))
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        grpc.channel_ready_future(self._channel).result(_TIMEOUT_S)
        self._step: Any = self._channel.unary_unary(
            "/noop.Env/Step", request_serializer=self._request.SerializeToString, response_deserializer=reply.FromString
        )

    def step(self, actions: Array) -> None:
        for env, action in enumerate(actions.tolist()):
            reply = self._step(self._request(env=env, action=action))
            self.obs[env] = reply.obs
            self.reward[env] = reply.reward
            self.terminated[env], self.truncated[env] = reply.terminated, reply.truncated

    def close(self) -> None:
        self._channel.close()
        self._process.close()


class Bare:
    """Sends and receives as many bytes as Corral's `tcp://`: an upper bound for sockets."""

    def __init__(self, noop: Noop, simulators: int, request: int, reply: int):
        self._request, self._room = b"x" * request, memoryview(bytearray(reply))
        self._sockets, self._processes = list[socket.socket](), list[SimulatorProcess]()
        with socket.create_server(("127.0.0.1", 0)) as door:
            door.settimeout(_TIMEOUT_S)
            args = "bytes", str(door.getsockname()[1]), str(request), str(reply)
            for _ in range(simulators):
                self._processes.append(SimulatorProcess(noop.command(*args)))
                self._sockets.append(door.accept()[0])
                self._sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def step(self, actions: Array) -> None:
        for sock in self._sockets:
            sock.sendall(self._request)
        for sock in self._sockets:
            _fill(sock, self._room)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        for process in self._processes:
            process.close()


def _fill(sock: socket.socket, room: memoryview) -> bool:
    """Receive until the buffer is full; False if the other side has closed."""
    got = 0
    while got < len(room):
        size = sock.recv_into(room[got:])
        if not size:
            return False
        got += size
    return True


@cache
def _messages() -> tuple[Any, Any]:
    """Request and reply of a step, equivalent to a .proto file."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds: Any = descriptor_pb2.FieldDescriptorProto
    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED
    file = descriptor_pb2.FileDescriptorProto(name="noop.proto", package="noop", syntax="proto3")
    for name, fields in (
        ("StepRequest", [("env", kinds.TYPE_INT32, one), ("action", kinds.TYPE_INT64, one)]),
        (
            "StepReply",
            [
                ("obs", kinds.TYPE_FLOAT, many), ("reward", kinds.TYPE_DOUBLE, one),
                ("terminated", kinds.TYPE_BOOL, one), ("truncated", kinds.TYPE_BOOL, one),
            ],
        ),
    ):  # fmt: skip
        message = file.message_type.add(name=name)
        for number, (field, kind, label) in enumerate(fields, 1):
            message.field.add(name=field, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    request, reply = (pool.FindMessageTypeByName(f"noop.{name}") for name in ("StepRequest", "StepReply"))
    return message_factory.GetMessageClass(request), message_factory.GetMessageClass(reply)


# -- simulators ------------------------------------------------------------------------------------------------


class NoopEnv(gymnasium.Env[Any, Any]):
    """Only answers, like `noop.cpp`."""

    def __init__(self) -> None:
        dtype, shape = SHAPES[os.environ.get("CORRAL_NOOP", "f4")]
        high = 255 if dtype == np.uint8 else 1e9
        self.observation_space = gymnasium.spaces.Box(0 if dtype == np.uint8 else -high, high, shape, dtype)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._t, self._wrap = 0, 256 if dtype == np.uint8 else 1 << 20

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._t = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1 + int(action)
        return self._observe(), 1.0, False, False, {}

    def _observe(self) -> Array:
        space = self.observation_space
        return np.full(space.shape or (), self._t % self._wrap, space.dtype)


def serve_link(url: str) -> None:
    """A simulator that connects over the link."""
    from corral.envs.serve.server import SimulatorServer
    from corral.link.address import parse_url
    from corral.link.transports.open import open_for_simulator

    logging.getLogger("corral").setLevel(logging.WARNING)
    SimulatorServer(NoopEnv, "noop", open_for_simulator(parse_url(url), None, bind=False), 1024).run(_ALONE_S)


def serve_json(url: str) -> None:
    """A simulator behind a REP socket."""
    import zmq

    context = zmq.Context()
    sock: Any = context.socket(zmq.REP)
    sock.setsockopt(zmq.RCVTIMEO, int(1000 * _ALONE_S))
    sock.bind(url)
    counts: dict[int, int] = defaultdict(int)
    while True:
        asked = sock.recv_json()
        counts[asked["env"]] += 1 + asked["action"]
        obs = [float(counts[asked["env"]])] * 4
        sock.send_json({"obs": obs, "reward": 1.0, "terminated": False, "truncated": False})


def serve_grpc(port: str) -> None:
    """A simulator behind a gRPC server with threads, as in gRPC's own examples."""
    import grpc

    request, reply = _messages()
    counts: dict[int, int] = defaultdict(int)

    def step(asked: Any, context: Any) -> Any:
        counts[asked.env] += 1 + asked.action
        return reply(obs=[float(counts[asked.env])] * 4, reward=1.0)

    server = grpc.server(futures.ThreadPoolExecutor(_THREADS))
    handler = grpc.unary_unary_rpc_method_handler(step, request.FromString, reply.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("noop.Env", {"Step": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination(_ALONE_S)


def serve_bytes(port: str, request: str, reply: str) -> None:
    """A simulator that answers `request` bytes with `reply` bytes."""
    with socket.create_connection(("127.0.0.1", int(port))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        room, answer = memoryview(bytearray(int(request))), b"x" * int(reply)
        while _fill(sock, room):
            sock.sendall(answer)


def main(mode: str, *args: str) -> None:
    """Run a simulator."""
    serve: dict[str, Callable[..., None]] = {
        "link": serve_link, "json": serve_json, "grpc": serve_grpc, "bytes": serve_bytes,
    }  # fmt: skip
    if mode not in serve:
        raise UserError(f"{mode} is not one of {', '.join(serve)}.")
    serve[mode](*args)


if __name__ == "__main__":
    main(*sys.argv[1:])
