"""`python -m benchmarks replay`: prioritised replay of a million transitions of CartPole's size.

Both libraries hold the same real experience. A batch of 512 is drawn with its weights, and gets new priorities; new
experience comes 64 transitions at a time, 8 environments by 8 steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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
from corral.data.replay import ReplayStore

Work = Literal["sample and update", "add"]

CAPACITY, BATCH = 1_000_000, 512
CORRAL, CPPRB = "corral", "cpprb"
_ENVS, _LENGTH, _FRAGMENTS = 8, 8, 2_000
_ALPHA, _BETA = 0.6, 0.4
_CPPRB = "pip install cpprb"
SCALE = Scale("python -m benchmarks replay", "transitions per second", CPPRB)


@dataclass(frozen=True)
class BenchReplay:
    """Measure transitions per second of prioritised replay beside other libraries, in interleaved rounds.

    Prints tables, and writes replay.png and replay.json. A library that is not installed is skipped.
    """

    rounds: int = 5
    """How often every contestant runs."""
    seconds: float = 1.0
    """How long it runs each time."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""

    def run(self) -> int:
        """Measure, print, and write the files."""
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
        """The work."""
        return self.work

    @property
    def label(self) -> str:
        """Title."""
        size = f"batches of {BATCH}" if self.work != "add" else f"{_ENVS} x {_LENGTH} at a time"
        return f"Prioritised replay of {CAPACITY:,} transitions, {self.work}, {size}"

    def base(self, outcome: Outcome) -> str:
        """cpprb, the fastest that we know."""
        return CPPRB

    def layers(self, outcome: Outcome) -> list[LayerRow]:
        """None: a draw and an update are not measured apart."""
        return []

    def verdicts(self, outcome: Outcome, layers: Sequence[LayerRow]) -> list[Verdict]:
        """Sampling has a target; adding has none."""
        if self.work == "add" or not {CORRAL, CPPRB} <= set(outcome.rates):
            return []
        figure = outcome.ratio(CORRAL, CPPRB)
        bound = "Bound: a draw and an update each touch a line of memory per level of the tree, most not in the cache."
        return [Verdict(f"{self.label}, over {CPPRB}", 1.5, figure, CORRAL, bound)]


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


class CorralReplay:
    """Corral's store."""

    def __init__(self, work: Work):
        spec, self._fragments = _experience()
        # Samples are paid for without end, so that the rate limiter never says no.
        data = DataSpec(
            "transition", 1, BATCH, "replay", samples_per_insert=1e12, prioritised=True, capacity=CAPACITY,
            min_size=BATCH,
        )  # fmt: skip
        self._store = ReplayStore(spec, data, _ENVS, alpha=_ALPHA, beta=_BETA)
        self._turn = self._add if work == "add" else self._sample
        self._next, self._priorities = itertools.cycle(self._fragments), _priorities()
        done = 0
        while done < CAPACITY:
            done += self._add()

    def run(self, seconds: float) -> Slice:
        """Work."""
        return timed(self._turn, seconds)

    def close(self) -> None:
        """Nothing to close."""

    def _add(self) -> int:
        traj = next(self._next)
        self._store.put(traj)
        return traj.reward.size

    def _sample(self) -> int:
        sample = self._store.get()
        self._store.feedback(sample.keys, next(self._priorities))
        return BATCH


class CpprbReplay:
    """cpprb's PrioritizedReplayBuffer."""

    def __init__(self, work: Work):
        from cpprb import PrioritizedReplayBuffer

        layout = {"obs": {"shape": 4}, "act": {"dtype": np.int64}, "rew": {}, "next_obs": {"shape": 4}, "done": {}}
        self._buffer = PrioritizedReplayBuffer(CAPACITY, layout, alpha=_ALPHA)
        self._turn = self._add if work == "add" else self._sample
        self._next, self._priorities = itertools.cycle([_rows(t) for t in _experience()[1]]), _priorities()
        done = 0
        while done < CAPACITY:
            done += self._add()

    def run(self, seconds: float) -> Slice:
        """Work."""
        return timed(self._turn, seconds)

    def close(self) -> None:
        """Nothing to close."""

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
    """Fragments of real episodes that follow on from each other."""
    actions = draw_actions(2, _ENVS)
    with Sampler("CartPole-v1", lambda obs: next(actions), _ENVS, "local") as sampler:
        rollouts = sampler.rollouts(_LENGTH)
        return sampler.vec.spec, [next(rollouts) for _ in range(_FRAGMENTS)]


def _rows(traj: Trajectory) -> dict[str, Array]:
    """A fragment's transitions as cpprb takes them, prepared beforehand."""

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
    """Errors as a learner would give them, for ever, drawn beforehand."""
    table = np.random.default_rng(0).exponential(size=(64, BATCH)).astype(np.float32)
    return itertools.cycle(list(table))
