"""What `python -m benchmarks sampling` compares: CartPole (cheap steps), Pong (images) and steps that wait.

In every case the contestants that fork come first, because forking a process with threads is unsafe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import gymnasium

from benchmarks.common.contestants import Lockstep, Pipelined, SampledRollouts, draw_actions, first_ready, in_halves
from benchmarks.common.report import LayerRow, Scale, Verdict
from benchmarks.common.rounds import Contestant, Entry, Outcome
from benchmarks.sampling import peers
from benchmarks.sampling.layers import COLUMNS, layers_of
from benchmarks.sampling.loops import Loops
from benchmarks.sampling.names import (
    ALE,
    ASYNC,
    BARE_ALL,
    BARE_LOCKSTEP,
    BARE_ONE,
    FIRST,
    GROUP_ALL,
    GROUP_ONE,
    HALVES,
    LOCAL,
    LOCAL_SAMPLER,
    LOCKSTEP,
    NATIVE,
    PROCESS,
    SAMPLER,
    SYNC,
)
from benchmarks.sampling.targets import verdicts
from corral.acting.sampler import Sampler
from corral.core.machine import cores
from corral.core.types import Array
from corral.envs.make import make_vec
from corral.envs.suites.atari import atari
from corral.envs.vec_env import VecEnv
from corral.testing.envs import SlowEnv

CaseName = Literal["cartpole", "pong", "slow"]

SCALE = Scale("python -m benchmarks sampling", "steps per second", "Sync", "microseconds per step and layer", COLUMNS,
              "backend")  # fmt: skip
_CARTPOLE = "CartPole-v1"
_PONG_ACTIONS = 6
_SLOW_S = (0.010, 0.050)
_SB3, _ENVPOOL, _ATARI = (f"pip install 'corral-rl[{extra}]'" for extra in ("sb3", "envpool", "atari"))


@dataclass(frozen=True)
class SamplingCase:
    """One comparison."""

    name: CaseName
    title: str
    num_envs: int
    entries: Sequence[Entry]
    ideal: float | None = None  # steps per second that cannot be exceeded, if known beforehand
    scale: Scale = field(default=SCALE, init=False)

    @property
    def label(self) -> str:
        """Title with the number of environments."""
        return f"{self.title} x {self.num_envs}"

    def base(self, outcome: Outcome) -> str:
        """Gymnasium's vector environment in one process."""
        return SYNC

    def layers(self, outcome: Outcome) -> list[LayerRow]:
        """Microseconds per step and layer, if all layers were measured."""
        return layers_of(outcome)

    def verdicts(self, outcome: Outcome, layers: Sequence[LayerRow]) -> list[Verdict]:
        """The targets at this size."""
        return verdicts(self, outcome)


def make_cases(names: Sequence[CaseName], num_envs: int | None) -> list[SamplingCase]:
    """The cases to run, each in its usual sizes unless one is given."""
    builders: dict[CaseName, tuple[Callable[[int], SamplingCase], tuple[int, ...]]] = {
        "cartpole": (cartpole, (64, 8)),
        "pong": (pong, (8, 32)),
        "slow": (slow, (16,)),
    }
    return [builders[name][0](count) for name in names for count in ((num_envs,) if num_envs else builders[name][1])]


def cartpole(n: int) -> SamplingCase:
    """CartPole, whose step costs microseconds: shows the overhead of each library."""
    gym = [partial(gymnasium.make, _CARTPOLE)] * n
    return SamplingCase(
        "cartpole",
        "CartPole",
        n,
        [
            Entry(ASYNC, "peer", lambda: peers.gymnasium_async(gym, 2)),
            Entry("SB3 Subproc", "peer", lambda: peers.sb3_subproc(gym, 2), _SB3),
            Entry("SB3 Dummy", "peer", lambda: peers.sb3_dummy(gym, 2), _SB3),
            Entry(SYNC, "peer", lambda: peers.gymnasium_sync(gym, 2)),
            Entry(BARE_ONE, "bound", lambda: Loops(_CARTPOLE, "bare", n, 1)),
            Entry(BARE_ALL, "bound", lambda: Loops(_CARTPOLE, "bare", n, cores())),
            Entry(BARE_LOCKSTEP, "bound", lambda: Loops(_CARTPOLE, "bare", n, cores(), lockstep=True)),
            Entry(GROUP_ONE, "layer", lambda: Loops(_CARTPOLE, "group", n, 1)),
            Entry(GROUP_ALL, "layer", lambda: Loops(_CARTPOLE, "group", n, cores())),
            Entry(LOCAL, "corral", lambda: _lockstep(_CARTPOLE, n, "local", 2)),
            Entry(LOCAL_SAMPLER, "layer", lambda: _rollouts(n, "local")),
            Entry(LOCKSTEP, "corral", lambda: _lockstep(_CARTPOLE, n, "process", 2)),
            Entry(FIRST, "corral", lambda: _first_ready(_CARTPOLE, n, cores(), max(1, n // 4))),
            Entry(HALVES, "corral", lambda: _in_halves(n)),
            Entry(SAMPLER, "corral", lambda: _rollouts(n, "process")),
            Entry("EnvPool sync", "peer", lambda: peers.envpool_sync(_CARTPOLE, n, 2), _ENVPOOL),
            Entry("EnvPool async", "peer", lambda: peers.envpool_halves(_CARTPOLE, n, 2), _ENVPOOL),
        ],
    )


def pong(n: int) -> SamplingCase:
    """Pong with 84 x 84 gray images, four stacked: the emulator dominates."""
    gym, sb3, choices = [peers.gymnasium_pong] * n, [peers.sb3_pong] * n, _PONG_ACTIONS
    pool = {"episodic_life": True, "reward_clip": True}
    return SamplingCase(
        "pong",
        "Pong 84x84x4",
        n,
        [
            Entry(ASYNC, "peer", lambda: peers.gymnasium_async(gym, choices), _ATARI),
            Entry("SB3 Subproc", "peer", lambda: peers.sb3_subproc(sb3, choices, 4), _SB3),
            Entry("SB3 Dummy", "peer", lambda: peers.sb3_dummy(sb3, choices, 4), _SB3),
            Entry(SYNC, "peer", lambda: peers.gymnasium_sync(gym, choices), _ATARI),
            Entry(LOCAL, "corral", lambda: _lockstep(atari("Pong"), n, "local", choices)),
            Entry(PROCESS, "corral", lambda: _lockstep(atari("Pong"), n, "process", choices)),
            Entry(NATIVE, "corral", lambda: _lockstep(atari("Pong"), n, "native", choices)),
            Entry(ALE, "peer", lambda: peers.ale_vector(n, choices), _ATARI),
            Entry("EnvPool sync", "peer", lambda: peers.envpool_sync("Pong-v5", n, choices, **pool), _ENVPOOL),
            Entry("EnvPool async", "peer", lambda: peers.envpool_halves("Pong-v5", n, choices, **pool), _ENVPOOL),
        ],
    )


def slow(n: int) -> SamplingCase:
    """A simulator whose step waits for 10 to 50 ms: waiting for the slowest environment costs time."""
    envs, choices = [SlowEnv] * n, 3
    return SamplingCase(
        "slow",
        "step of 10-50 ms",
        n,
        [
            Entry(ASYNC, "peer", lambda: peers.gymnasium_async(envs, choices)),
            Entry("SB3 Subproc", "peer", lambda: peers.sb3_subproc(envs, choices), _SB3),
            Entry(SYNC, "peer", lambda: peers.gymnasium_sync(envs, choices)),
            Entry(FIRST, "corral", lambda: _first_ready(SlowEnv, n, n, 1)),
        ],
        ideal=n / (sum(_SLOW_S) / 2),
    )


def _lockstep(env: Any, n: int, backend: str, choices: int) -> Contestant:
    vec = make_vec(env, n, backend)
    ids = vec.recv().env_ids

    def step(actions: Array) -> None:
        vec.send(ids, actions)
        vec.recv()

    return Lockstep(step, n, draw_actions(choices, n), vec.close)


def _first_ready(env: Any, n: int, workers: int, min_ready: int) -> Pipelined:
    return first_ready(_process(env, n, workers), min_ready, draw_actions(2, n))


def _in_halves(n: int) -> Pipelined:
    return in_halves(_process(_CARTPOLE, n, cores()), draw_actions(2, n))


def _process(env: Any, n: int, workers: int) -> VecEnv:
    return make_vec(env, n, "process", workers)


def _rollouts(n: int, backend: str) -> Contestant:
    return SampledRollouts(lambda policy: Sampler(_CARTPOLE, policy, n, backend), draw_actions(2, n))
