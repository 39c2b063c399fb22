"""Ways to drive vector environments for a slice of time, with random actions drawn beforehand."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.common.rounds import Slice
from corral.acting.sampler import Sampler
from corral.core.types import Array, Trajectory
from corral.envs.vec_env import VecEnv

_DRAWN = 1024
_ROLLOUT_STEPS = 128


def draw_actions(choices: int, num_envs: int, dtype: Any = np.int64) -> Iterator[Array]:
    """Endless rows of random actions, drawn once, so that drawing them is not measured."""
    table = np.random.default_rng(0).integers(choices, size=(_DRAWN, num_envs)).astype(dtype)
    return itertools.cycle(list(table))


def timed(turn: Callable[[], int], seconds: float) -> Slice:
    """Call `turn`, which returns its number of steps, until the time is over."""
    steps, start = 0, time.perf_counter()
    while True:
        steps += turn()
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return Slice(steps, elapsed)


class Lockstep:
    """All environments step, then all receive their next action."""

    def __init__(self, step: Callable[[Array], Any], num_envs: int, actions: Iterator[Array], close: Callable[[], Any]):
        self._step, self._num_envs, self._actions, self.close = step, num_envs, actions, close

    def run(self, seconds: float) -> Slice:
        return timed(self._turn, seconds)

    def _turn(self) -> int:
        self._step(next(self._actions))
        return self._num_envs


class Pipelined:
    """Some environments step while others receive their next action.

    The clock starts and stops with all environments in flight, so that a slice measures the steady state.
    """

    def __init__(
        self,
        num_envs: int,
        send: Callable[[], None],
        turn: Callable[[], int],
        land: Callable[[], Any],
        close: Callable[[], Any],
    ):
        self._num_envs, self._take_off, self._turn, self._land = num_envs, send, turn, land
        self.close = close

    def run(self, seconds: float) -> Slice:
        """Send to all environments, reach the steady state, measure, and receive from all."""
        self._take_off()
        settled = 0
        while settled < 4 * self._num_envs:
            settled += self._turn()
        result = timed(self._turn, seconds)
        self._land()
        return result


def first_ready(vec: VecEnv, min_ready: int, actions: Iterator[Array]) -> Pipelined:
    """Corral: receive from at least `min_ready` environments, and send to them immediately."""
    everyone = [vec.recv().env_ids]

    def turn() -> int:
        batch = vec.recv(min_ready=min_ready)
        vec.send(batch.env_ids, next(actions)[: len(batch)])
        return len(batch)

    return Pipelined(vec.num_envs, lambda: _send(vec, everyone, actions), turn, vec.recv, vec.close)


def in_halves(vec: VecEnv, actions: Iterator[Array]) -> Pipelined:
    """Corral: one half steps while actions are selected for the other half."""
    halves = [half for half in np.array_split(vec.recv().env_ids, 2) if len(half)]

    def turn() -> int:
        for ids in halves:
            vec.recv(env_ids=ids)
            vec.send(ids, next(actions)[: len(ids)])
        return vec.num_envs

    return Pipelined(vec.num_envs, lambda: _send(vec, halves, actions), turn, vec.recv, vec.close)


def _send(vec: VecEnv, groups: Sequence[Array], actions: Iterator[Array]) -> None:
    for ids in groups:
        vec.send(ids, next(actions)[: len(ids)])


def envpool_async(pool: Any, num_envs: int, actions: Iterator[Array]) -> Pipelined:
    """EnvPool: receive the first half that is ready, and send to it; its batch size must be half."""
    pool.async_reset()

    def recv() -> Array:
        ids: Array = pool.recv()[-1]["env_id"]
        return ids

    waiting = [recv(), recv()]

    def send() -> None:
        for ids in waiting:
            pool.send(next(actions)[: len(ids)], ids)

    def turn() -> int:
        ids = recv()
        pool.send(next(actions)[: len(ids)], ids)
        return len(ids)

    def land() -> None:
        waiting[:] = [recv(), recv()]

    return Pipelined(num_envs, send, turn, land, close=lambda: None)


class SampledRollouts:
    """Trajectories of Corral's Sampler, with a policy that returns actions drawn beforehand."""

    def __init__(self, make_sampler: Callable[[Callable[[Array], Array]], Sampler], actions: Iterator[Array]):
        self._sampler = make_sampler(lambda obs: next(actions)[: len(obs)])
        self._rollouts: Iterator[Trajectory] = self._sampler.rollouts(_ROLLOUT_STEPS)

    def run(self, seconds: float) -> Slice:
        return timed(self._turn, seconds)

    def close(self) -> None:
        self._sampler.close()

    def _turn(self) -> int:
        return next(self._rollouts).reward.size
