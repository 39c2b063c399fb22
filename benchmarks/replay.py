"""`python -m benchmarks replay`: prioritised replay of a million transitions of CartPole's size.

Both libraries hold the same real experience. Batches of 512 are sampled with their weights and get new priorities; new
experience arrives 64 transitions at a time, 8 environments by 8 steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.common.command import require_interleaved, run_cases
from benchmarks.common.contestants import draw_actions, timed
from benchmarks.common.report import LayerRow, Scale, Verdict
from benchmarks.common.rounds import Entry, Outcome, Slice
from corral.acting.sampler import Sampler
from corral.core.types import Array, DataSpec, EnvSpec, Trajectory
from corral.data.transition_replay import TransitionReplay

Work = Literal["sample and update", "add"]

CAPACITY, BATCH = 1_000_000, 512
CORRAL, CPPRB = "corral", "cpprb"
_ENVS, _LENGTH, _FRAGMENTS = 8, 8, 2_000
_ALPHA, _BETA = 0.6, 0.4
_CPPRB = "pip install cpprb"
SCALE = Scale("python -m benchmarks replay", "transitions per second", CPPRB)


@dataclass(frozen=True)
class BenchReplay:
    """Measure transitions per second of prioritised replay, compared with other libraries in interleaved rounds.

    Prints tables, and writes replay.png and replay.json. A library that is not installed is skipped.
    """

    rounds: int = 5
    """Number of rounds; every contestant runs in each."""
    seconds: float = 1.0
    """Seconds per contestant and round."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""

    def run(self) -> int:
        require_interleaved(self)
        return run_cases("replay", asdict(self) | {"out": str(self.out)}, self, make_cases())


@dataclass(frozen=True)
class ReplayCase:
    """One kind of work, in transitions per second."""

    work: Work
    entries: Sequence[Entry]
    num_envs: int = _ENVS
    ideal: float | None = field(default=None, init=False)
    scale: Scale = field(default=SCALE, init=False)

    @property
    def name(self) -> str:
        return self.work

    @property
    def label(self) -> str:
        size = f"batches of {BATCH}" if self.work != "add" else f"{_ENVS} x {_LENGTH} at a time"
        return f"Prioritised replay of {CAPACITY:,} transitions, {self.work}, {size}"

    def base(self, outcome: Outcome) -> str:
        """cpprb, the fastest known to us."""
        return CPPRB

    def layers(self, outcome: Outcome) -> list[LayerRow]:
        """None: sampling and updating are not measured separately."""
        return []

    def verdicts(self, outcome: Outcome, layers: Sequence[LayerRow]) -> list[Verdict]:
        """Sampling has a target; adding has none."""
        if self.work == "add" or not {CORRAL, CPPRB} <= set(outcome.rates):
            return []
        figure = outcome.ratio(CORRAL, CPPRB)
        bound = (
            "Bound: sampling and updating touch one cache line per level of the tree, and most are not in the cache."
        )
        return [Verdict(f"{self.label}, {CORRAL} over {CPPRB}", 1.5, figure, CORRAL, bound)]


def make_cases() -> list[ReplayCase]:
    """Both kinds of work."""
    works: tuple[Work, ...] = ("sample and update", "add")
    return [
        ReplayCase(
            work,
            [
                Entry(CPPRB, "peer", partial(CpprbReplay, work), _CPPRB),
                Entry(CORRAL, "corral", partial(CorralReplay, work)),
            ],
        )
        for work in works
    ]


class FullReplay:
    """A buffer that is filled before it is measured; subclasses create it before they call `__init__`."""

    def __init__(self, work: Work):
        self._turn = self._add if work == "add" else self._sample
        self._priorities = _priorities()
        done = 0
        while done < CAPACITY:
            done += self._add()

    def run(self, seconds: float) -> Slice:
        return timed(self._turn, seconds)

    def close(self) -> None:
        """Nothing to close."""

    def _add(self) -> int:
        raise NotImplementedError

    def _sample(self) -> int:
        raise NotImplementedError


class CorralReplay(FullReplay):
    """Corral's store."""

    def __init__(self, work: Work):
        spec, fragments = _experience()
        # With so many samples per insert the rate limiter never blocks.
        data = DataSpec(
            "transition", 1, BATCH, "replay", samples_per_insert=1e12, prioritised=True, capacity=CAPACITY,
            min_size=BATCH,
        )  # fmt: skip
        self._store = TransitionReplay(spec, replace(data, priority_alpha=_ALPHA, priority_beta=_BETA), _ENVS)
        self._next = itertools.cycle(fragments)
        super().__init__(work)

    def _add(self) -> int:
        traj = next(self._next)
        self._store.put(traj)
        return traj.reward.size

    def _sample(self) -> int:
        sample = self._store.get()
        self._store.feedback(sample.keys, next(self._priorities))
        return BATCH


class CpprbReplay(FullReplay):
    """cpprb's PrioritizedReplayBuffer."""

    def __init__(self, work: Work):
        from cpprb import PrioritizedReplayBuffer

        layout = {"obs": {"shape": 4}, "act": {"dtype": np.int64}, "rew": {}, "next_obs": {"shape": 4}, "done": {}}
        self._buffer = PrioritizedReplayBuffer(CAPACITY, layout, alpha=_ALPHA)
        self._next = itertools.cycle([_rows(t) for t in _experience()[1]])
        super().__init__(work)

    def _add(self) -> int:
        rows = next(self._next)
        self._buffer.add(**rows)
        return len(rows["rew"])

    def _sample(self) -> int:
        sample = self._buffer.sample(BATCH, beta=_BETA)
        self._buffer.update_priorities(sample["indexes"], next(self._priorities))
        return BATCH


@cache
def _experience() -> tuple[EnvSpec, list[Trajectory]]:
    """Consecutive fragments of real episodes."""
    actions = draw_actions(2, _ENVS)
    with Sampler("CartPole-v1", lambda obs: next(actions), _ENVS, "local") as sampler:
        rollouts = sampler.rollouts(_LENGTH)
        return sampler.vec.spec, [next(rollouts) for _ in range(_FRAGMENTS)]


def _rows(traj: Trajectory) -> dict[str, Array]:
    """A fragment's transitions in cpprb's format, prepared beforehand."""

    def flat(array: Array) -> Array:
        return np.ascontiguousarray(array.reshape(-1, *array.shape[2:]))

    next_obs: Any = traj.next_obs()
    return {
        "obs": flat(traj.obs[:-1]),
        "act": flat(traj.action),
        "rew": flat(traj.reward),
        "next_obs": flat(next_obs),
        "done": flat(traj.terminated),
    }


def _priorities() -> Any:
    """Endless errors like those of a learner, drawn beforehand."""
    table = np.random.default_rng(0).exponential(size=(64, BATCH)).astype(np.float32)
    return itertools.cycle(list(table))
