"""An upper bound: the same environments stepped in a bare loop, in processes that never communicate.

The same loop around Corral's `EnvGroup` shows the cost of that layer.
"""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Literal

import numpy as np

from benchmarks.common.children import child_env
from benchmarks.common.contestants import draw_actions, timed
from benchmarks.common.rounds import Slice
from corral.core.types import Array
from corral.envs.resolve import resolve
from corral.envs.stepping.group import EnvGroup
from corral.envs.stepping.id_set import IdSets
from corral.envs.stepping.rows import EnvRows
from corral.envs.supervision import IDLE

Layer = Literal["bare", "group"]

_TIMEOUT_S = 60.0
_ASK, _ANSWER = struct.Struct("d"), struct.Struct("qd")  # seconds to run; steps made, and seconds they took


class Loops:
    """`num_envs` environments in `workers` processes that synchronize only at the end of a slice.

    In `lockstep` they synchronize after every step: the parent wakes each process with a few bytes, and each wakes the
    parent. No sampler with worker processes can wait less, because these bytes carry neither actions nor results.
    """

    def __init__(self, env: str, layer: Layer, num_envs: int, workers: int, *, lockstep: bool = False):
        self._lockstep = lockstep
        self._loops = []
        for ids in np.array_split(np.arange(num_envs), min(workers, num_envs)):
            ours, theirs = socket.socketpair()
            with theirs:
                # Not multiprocessing, which would import the caller's main module.
                call = f"serve({theirs.fileno()}, {env!r}, {layer!r}, {len(ids)})"
                code = f"from benchmarks.sampling.loops import serve; {call}"
                process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=child_env())
            self._loops.append((process, ours))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._loops]

    def run(self, seconds: float) -> Slice:
        if self._lockstep:
            return timed(lambda: self._ask(0.0).steps, seconds)
        return self._ask(seconds)

    def close(self) -> None:
        for process, end in self._loops:
            end.close()
            process.kill()
            process.wait()

    def _ask(self, seconds: float) -> Slice:
        """Wake all processes and wait for their answers; with 0 seconds every environment steps once."""
        for _, end in self._loops:
            end.send(_ASK.pack(seconds))
        steps, longest = 0, 0.0
        for _, end in self._loops:
            end.settimeout(seconds + _TIMEOUT_S)
            made, took = _ANSWER.unpack(end.recv(_ANSWER.size))
            steps, longest = steps + made, max(longest, took)
        return Slice(steps, longest)


def serve(fd: int, env: str, layer: Layer, num_envs: int) -> None:
    """In a child process: run slices until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes its end
    step = (_bare if layer == "bare" else _group)(env, num_envs)
    actions = draw_actions(2, num_envs)
    with socket.socket(fileno=fd) as end:
        while asked := end.recv(_ASK.size):
            done = timed(lambda: step(next(actions)), *_ASK.unpack(asked))
            end.send(_ANSWER.pack(done.steps, done.seconds))


def _bare(env: str, num_envs: int) -> Callable[[Array], int]:
    """Only `step` and `reset`."""
    factory = resolve(env).factory
    envs = [factory() for _ in range(num_envs)]
    for number, one in enumerate(envs):
        one.reset(seed=number)

    def step(actions: Array) -> int:
        for one, action in zip(envs, list(actions), strict=True):
            _, _, terminated, truncated, _ = one.step(action)
            if terminated or truncated:
                one.reset()
        return num_envs

    return step


def _group(env: str, num_envs: int) -> Callable[[Array], int]:
    """Corral's `EnvGroup`, which also copies and checks results and starts new episodes."""
    factory = resolve(env).factory
    group = EnvGroup(dict.fromkeys(range(num_envs), factory), env, lambda fault: None, [IDLE])
    rows, sets = EnvRows(group.build(), num_envs), IdSets(num_envs)
    group.attach(rows, sets)
    group.reset(sets.all_envs.ids, 0, "train")

    def step(actions: Array) -> int:
        rows.flip(sets.all_envs)
        rows.action[0][:] = actions
        group.step(sets.all_envs, lambda ready: None)
        return num_envs

    return step
