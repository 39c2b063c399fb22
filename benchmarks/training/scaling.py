"""What `python -m benchmarks training` compares with actors: APPO, IMPALA, steps that wait, central inference.

On CartPole all have networks of 64 x 64 and one thread per process. Otherwise Sample Factory and RLlib run with the
settings of their CartPole examples, with as many acting processes as cores, and with few and many environments; ratios
use the fastest.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.common.contestants import Pipelined, draw_actions, first_ready
from benchmarks.common.report import LayerRow, Scale, Verdict
from benchmarks.common.rounds import Entry, Outcome, Spread
from benchmarks.training.free_running import BUILD_S, FreeRunning
from benchmarks.training.scaled import MeteredLoops, Scaled, Usage
from corral.core.machine import cores
from corral.envs.make import make_vec
from corral.testing.envs import SlowEnv

CaseName = Literal["appo", "impala", "sleep", "central", "central-pong"]
CASES: tuple[CaseName, ...] = ("appo", "impala", "sleep", "central", "central-pong")
COLUMNS = ("simulator", "actors' rest", "learner", "idle or others")
"""Stepping alone; policy, bookkeeping and messages; the learner's process; time that Corral did not use."""
BARE = f"bare loop, {cores()} processes"
LOCAL, CENTRAL = "corral, local policies", "corral, central inference"
SYNC, WAITING, FIRST = "corral, sync", "corral, 4 actors x 16", "corral's environments, no learner"
_ENV = "CartPole-v1"
_COUNTING, _SLOW = "corral.testing.counting_agent:Counting", "corral.testing.envs:SlowEnv"
_STEPS = 1024
_SLOW_S = (0.010, 0.050)
_MAX_ADDED = 0.15
_HERE = Path(__file__).parent
_SF = "pip install sample-factory into a separate environment, and pass its Python: --sample-factory PYTHON"
_RLLIB = "pip install 'corral-rl[rllib]'"


@dataclass(frozen=True)
class ScalingCase:
    """One comparison: the best of `ours` must be `needed` times as fast as the best of `theirs`, or the ideal."""

    name: CaseName
    label: str
    entries: Sequence[Entry]
    ours: Sequence[str]
    theirs: Sequence[str]
    needed: float
    title: str  # of the column of ratios
    num_envs: int | None = None
    ideal: float | None = None
    usage: Mapping[str, Usage] = field(default_factory=dict)
    bound: str = ""

    @property
    def scale(self) -> Scale:
        unit, layers = "steps per second", f"CPU milliseconds of {cores()} cores per 1,024 steps and layer"
        return Scale("python -m benchmarks training", unit, self.title, layers, COLUMNS, "contestant")

    def base(self, outcome: Outcome) -> str:
        """The peer's fastest contestant; its first if none ran."""
        return outcome.fastest(self.theirs) or self.theirs[0]

    def verdicts(self, outcome: Outcome, layers: Sequence[LayerRow]) -> list[Verdict]:
        """Whether the target is met; empty if one side did not run."""
        ours, base = outcome.fastest(self.ours), self.base(outcome)
        if ours is None:
            return []
        bound = self.bound or _bound(layers, outcome, ours)
        if self.ideal:
            figure = Spread.of(rate / self.ideal for rate in outcome.rates[ours])
            return [Verdict(f"{self.label}, corral over the ideal rate", self.needed, figure, ours, bound)]
        if base not in outcome.rates:
            return []
        return [Verdict(f"{self.label}, {ours} over {base}", self.needed, outcome.ratio(ours, base), ours, bound)]

    def layers(self, outcome: Outcome) -> list[LayerRow]:
        """Where the cores' time goes for Corral's fastest contestant; empty if that or the bare loop was skipped."""
        ours = outcome.fastest(self.ours)
        used, bare = self.usage.get(ours or ""), self.usage.get(BARE)
        if ours is None or not used or not bare or not used.steps or not bare.steps:
            return []
        per = 1e3 * _STEPS / used.steps
        total, simulator = per * used.seconds * cores(), 1e3 * _STEPS / bare.steps * bare.acting
        acting, learning = per * used.acting, per * used.learning
        values = (simulator, acting - simulator, learning, total - acting - learning)
        parts = {column: Spread.of([value]) for column, value in zip(COLUMNS, values, strict=True)}
        return [LayerRow(ours, parts, Spread.of([total]))]


def make_case(name: CaseName, sample_factory: str = sys.executable) -> ScalingCase:
    """A comparison by its name; `sample_factory` is the Python that has Sample Factory."""
    if name == "appo":
        return _appo(sample_factory)
    if name in ("central", "central-pong"):
        return _central(name, _ENV if name == "central" else "ALE/Pong-v5")
    return {"impala": _impala, "sleep": _sleep}[name]()


def _appo(python: str) -> ScalingCase:
    """Sequences of 32 steps, one update per 1,024 steps, one epoch."""
    workers = cores()
    peers = [
        Entry(
            f"Sample Factory, {workers} workers x {n}", "peer",
            partial(FreeRunning, _HERE / "peer_sample_factory.py", str(workers), str(n), python=python), _SF, BUILD_S,
        )
        for n in (8, 32)
    ]  # fmt: skip
    settings = {"num_steps": 32, "batch_size": 32, "update_epochs": 1, "num_minibatches": 1}
    ours, usage = _ours("appo", ((1, 32), (workers, 8), (workers, 32)), settings)
    label = "APPO CartPole, an update for every 1,024 steps"
    entries = [*peers, _bare(32 * workers, usage), *ours]
    return ScalingCase("appo", label, entries, _names(ours), _names(peers), 3.0, "SF", usage=usage)


def _impala() -> ScalingCase:
    """One update per 500 steps in RLlib, as in its example, and per 512 steps in Corral."""
    runners = cores()
    sizes = ((runners, 16, 1), (1, 16, 1), (1, 16, 0))
    peers = [
        Entry(
            f"RLlib, {r} env runner{'s' if r > 1 else ''} x {n}, {'a learner' if learners else 'learning in main'}",
            "peer", partial(FreeRunning, _HERE / "peer_rllib.py", str(r), str(n), str(learners)), _RLLIB, BUILD_S,
        )
        for r, n, learners in sizes
    ]  # fmt: skip
    ours, usage = _ours("impala", ((1, 16), (1, 32), (runners, 16)), {"num_steps": 32, "batch_size": 16})
    label = "IMPALA CartPole, an update for every 500 steps"
    entries = [*peers, _bare(16 * runners, usage), *ours]
    return ScalingCase("impala", label, entries, _names(ours), _names(peers), 5.0, "RLlib", usage=usage)


def _sleep() -> ScalingCase:
    """Environments that only wait, like remote simulators: none should wait for another."""
    n, actors = 64, 4
    slow = partial(Scaled, _COUNTING, _SLOW, num_envs=n, length=20)
    entries = [
        Entry(SYNC, "peer", partial(slow, topology="sync")),
        Entry(FIRST, "bound", partial(_all_at_once, n)),
        Entry(WAITING, "corral", partial(slow, topology="actor_learner", actors=actors)),
    ]
    low, high = _SLOW_S
    each = n // actors
    slowest = low + (high - low) * each / (each + 1)
    ideal = n / ((low + high) / 2)
    bound = (
        f"The ideal is {ideal:,.0f} steps/s. An actor that waits for the slowest of its {each} environments needs "
        f"{slowest * 1e3:.1f} ms per step, and reaches {n / slowest / ideal:.2f} of the ideal."
    )
    label = f"a step of 10-50 ms, {n} environments on {actors} actors"
    return ScalingCase("sleep", label, entries, [WAITING], [SYNC], 0.9, "sync", n, ideal, bound=bound)


def _central(case: CaseName, env: str) -> ScalingCase:
    """The same environments in the same number of processes, with local policies or central inference."""
    n = 32
    settings: dict[str, Any] = {"num_steps": 32, "batch_size": 16, "actors": cores(), "num_envs": n}
    entries = [
        Entry(name, "corral", partial(Scaled, "impala", env, topology=topology, backend=backend, **settings))
        for name, topology, backend in ((LOCAL, "actor_learner", "local"), (CENTRAL, "central_inference", "process"))
    ]
    bound = f"At most {_MAX_ADDED:.0%} more time per step is a rate of 1/{1 + _MAX_ADDED:g}."
    label = f"IMPALA {env}, {n} environments in {cores()} processes"
    needed = round(1 / (1 + _MAX_ADDED), 2)
    return ScalingCase(case, label, entries, [CENTRAL], [LOCAL], needed, "local", n, bound=bound)


def _ours(
    algo: str, sizes: Sequence[tuple[int, int]], settings: Mapping[str, Any]
) -> tuple[list[Entry], dict[str, Usage]]:
    """Corral with several numbers of actors and environments, and their CPU usage."""
    usage: dict[str, Usage] = {}
    entries = []
    for actors, each in sorted(set(sizes)):
        name = f"corral, {actors} actor{'s' if actors > 1 else ''} x {each}"
        usage[name] = Usage()
        build = partial(
            Scaled, algo, _ENV, usage[name], topology="actor_learner", actors=actors, num_envs=actors * each,
            backend="local", **settings,
        )  # fmt: skip
        entries.append(Entry(name, "corral", build))
    return entries, usage


def _bare(num_envs: int, usage: dict[str, Usage]) -> Entry:
    usage[BARE] = Usage()
    return Entry(BARE, "bound", partial(MeteredLoops, usage[BARE], _ENV, num_envs, cores()))


def _all_at_once(num_envs: int) -> Pipelined:
    """Environments that wait concurrently, each stepped again when it is ready, with actions drawn beforehand."""
    return first_ready(make_vec(SlowEnv, num_envs, "process", num_envs), 1, draw_actions(3, num_envs))


def _names(entries: Sequence[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def _bound(layers: Sequence[LayerRow], outcome: Outcome, ours: str) -> str:
    """The layer that takes most of the cores' time, and the speed of the simulator alone."""
    if not layers:
        return ""
    parts, total, largest = layers[0].layers, layers[0].total.median, layers[0].largest
    return (
        f"Bound: {largest} takes {parts[largest].median:.1f} of {total:.1f} CPU ms per 1,024 steps; the simulator "
        f"alone steps {outcome.ratio(BARE, ours).median:.1f} times as fast."
    )
