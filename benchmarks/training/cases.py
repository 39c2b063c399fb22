"""What `python -m benchmarks training` compares: PPO, A2C and DQN on CartPole, with the same sizes for all.

All have networks of 64 x 64, the same batches and the same number of updates per step, and write no logs and no
checkpoints. Stable-Baselines3 is measured with one torch thread and with one per core; ratios use the faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from benchmarks.common.contestants import draw_actions, timed
from benchmarks.common.report import LayerRow, Scale, Verdict
from benchmarks.common.rounds import Entry, Outcome, Slice, Spread
from benchmarks.sampling.loops import Loops
from benchmarks.training.peers import ENV, CleanRl, Sb3
from corral.acting.sampler import Sampler
from corral.config.experiment import Experiment
from corral.core.machine import cores
from corral.core.types import Trajectory
from corral.topologies.sync import Sync

CaseName = Literal["ppo", "a2c", "dqn"]
CASES: tuple[CaseName, ...] = ("ppo", "a2c", "dqn")
COLUMNS = ("simulator", "bookkeeping", "acting", "learning")
"""Stepping alone; copying, checks, resets and trajectories; the policy; everything else."""
SCALE = Scale(
    "python -m benchmarks training",
    "steps per second",
    "SB3",
    "milliseconds per 1,024 steps and layer",
    COLUMNS,
    "contestant",
)
BARE, DRAWN, ACTING = "bare loop, 1 process", "corral Sampler, actions drawn beforehand", "corral, acting only"
_SB3 = "pip install 'corral-rl[sb3]'"
_STEPS = 1024


@dataclass(frozen=True)
class TrainingCase:
    """One comparison: the best of `ours` must be `needed` times as fast as the best of `theirs`."""

    name: CaseName
    label: str
    entries: Sequence[Entry]
    ours: Sequence[str]
    theirs: Sequence[str]
    needed: float
    layered: str  # the contestant of the layer table
    num_envs: int | None = None
    ideal: float | None = field(default=None, init=False)
    scale: Scale = field(default=SCALE, init=False)

    def base(self, outcome: Outcome) -> str:
        """The fastest Stable-Baselines3; the first if none ran."""
        return outcome.fastest(self.theirs) or self.theirs[0]

    def verdicts(self, outcome: Outcome, layers: Sequence[LayerRow]) -> list[Verdict]:
        """Whether the target is met; empty if one side did not run."""
        ours, base = outcome.fastest(self.ours), self.base(outcome)
        if ours is None or base not in outcome.rates:
            return []
        target = f"{self.label}, corral over {base}"
        return [Verdict(target, self.needed, outcome.ratio(ours, base), ours, _bound(layers))]

    def layers(self, outcome: Outcome) -> list[LayerRow]:
        """Where the time goes, from differences within rounds; empty if a layer was skipped."""
        chain = (BARE, DRAWN, ACTING, self.layered)
        if not set(chain) <= set(outcome.rates):
            return []
        took = [[0.0] * len(outcome.rates[self.layered])]
        took += [[1e3 * _STEPS / rate for rate in outcome.rates[name]] for name in chain]
        parts = {
            column: Spread.of(a - b for a, b in zip(took[k + 1], took[k], strict=True))
            for k, column in enumerate(COLUMNS)
        }
        return [LayerRow(self.layered, parts, Spread.of(took[-1]))]


class Training:
    """Corral's `sync` topology, as `corral train` runs it."""

    def __init__(self, algo: str, num_envs: int, **settings: Any):
        given = {"num_envs": num_envs, "backend": "local", **settings}
        experiment = Experiment.make(algo, ENV, preset="none", overrides=given)
        self._sync = Sync(experiment, note=lambda kind, text: None)
        self.close = self._sync.close

    def run(self, seconds: float) -> Slice:
        torch.set_num_threads(self._sync.threads)
        return timed(self._turn, seconds)

    def _turn(self) -> int:
        before = self._sync.env_steps
        self._sync.advance()
        return self._sync.env_steps - before


class Fragments:
    """Samples short trajectories without learning."""

    def __init__(self, sampler: Sampler, steps: int, close: Callable[[], None]):
        self._rollouts: Iterator[Trajectory] = sampler.rollouts(steps)
        self.close = close

    def run(self, seconds: float) -> Slice:
        torch.set_num_threads(1)
        return timed(lambda: next(self._rollouts).reward.size, seconds)


def make_case(name: CaseName) -> TrainingCase:
    """A comparison by its name."""
    return {"ppo": _ppo, "a2c": _a2c, "dqn": _dqn}[name]()


def _ppo() -> TrainingCase:
    n = 8
    corral = {
        "num_steps": 128,
        "update_epochs": 4,
        "num_minibatches": 4,
        "learning_rate": 3e-4,
        "anneal_lr": False,
        "ent_coef": 0.0,
    }
    sb3 = {"n_steps": 128, "n_epochs": 4, "batch_size": 256}
    peers = _sb3_entries("ppo", n, sb3)
    entries = [
        *peers,
        Entry("CleanRL's ppo.py, 1 thread", "peer", partial(CleanRl, n)),
        *_layers("ppo", n, 128, corral),
        Entry("corral", "corral", partial(Training, "ppo", n, **corral)),
    ]
    label = f"PPO CartPole, {n} x 128 steps, 4 epochs x 4 minibatches"
    return TrainingCase("ppo", label, entries, ["corral"], [entry.name for entry in peers], 3.0, "corral", n)


def _a2c() -> TrainingCase:
    n, peers = 8, _sb3_entries("a2c", 8, {})
    entries = [*peers, *_layers("a2c", n, 5, {}), Entry("corral", "corral", partial(Training, "a2c", n))]
    label = f"A2C CartPole, {n} x 5 steps"
    return TrainingCase("a2c", label, entries, ["corral"], [entry.name for entry in peers], 2.0, "corral", n)


def _dqn() -> TrainingCase:
    """One update of 32 transitions per 4 steps; with more than 4 environments, several updates in a row."""
    corral = {
        "buffer_size": 1_000_000, "learning_starts": 100, "batch_size": 32, "train_frequency": 4, "gradient_steps": 1,
        "target_update_period": 2_500, "double_q": False, "exploration_initial_eps": 0.05,
        "exploration_final_eps": 0.05,
    }  # fmt: skip
    common = {"exploration_initial_eps": 0.05, "exploration_final_eps": 0.05}
    peers = _sb3_entries("dqn", 1, common, ", 1 env")
    peers += _sb3_entries("dqn", 4, {**common, "train_freq": 1}, ", 4 envs")
    peers += _sb3_entries("dqn", 16, {**common, "train_freq": 1, "gradient_steps": 4}, ", 16 envs")
    sizes = (1, 4, 16)
    ours = {n: f"corral, {n} env{'s' if n > 1 else ''}" for n in sizes}
    entries = [
        *peers,
        *_layers("dqn", 16, 1, corral),
        *(Entry(ours[n], "corral", partial(Training, "dqn", n, **corral)) for n in sizes),
    ]
    label = "DQN CartPole, 1 update of 32 per 4 steps"
    theirs = [entry.name for entry in peers]
    return TrainingCase("dqn", label, entries, list(ours.values()), theirs, 2.0, ours[16])


def _sb3_entries(algo: str, num_envs: int, settings: Mapping[str, Any], size: str = "") -> list[Entry]:
    counts = sorted({1, cores()})
    names = [f"SB3{size}, {count} thread{'s' if count > 1 else ''}" for count in counts]
    builds = [partial(Sb3, algo, num_envs, count, **settings) for count in counts]
    return [Entry(name, "peer", build, _SB3) for name, build in zip(names, builds, strict=True)]


def _layers(algo: str, num_envs: int, steps: int, settings: Mapping[str, Any]) -> list[Entry]:
    """The same work without learning, without the network, and without Corral."""

    def drawn() -> Fragments:
        actions = draw_actions(2, num_envs)
        sampler = Sampler(ENV, lambda obs: next(actions)[: len(obs)], num_envs, "local")
        return Fragments(sampler, steps, sampler.close)

    def acting() -> Fragments:
        given = {"num_envs": num_envs, "backend": "local", **settings}
        sync = Sync(Experiment.make(algo, ENV, preset="none", overrides=given), note=lambda kind, text: None)
        return Fragments(sync.sampler, steps, sync.close)

    return [
        Entry(BARE, "layer", partial(Loops, ENV, "bare", num_envs, 1)),
        Entry(DRAWN, "layer", drawn),
        Entry(ACTING, "layer", acting),
    ]


def _bound(layers: Sequence[LayerRow]) -> str:
    """The layer that takes most of the time, and the time of the simulator alone."""
    if not layers:
        return ""
    parts, total, largest = layers[0].layers, layers[0].total.median, layers[0].largest
    return (
        f"Bound: {largest} takes {parts[largest].median:.1f} of {total:.1f} ms per 1,024 steps; the simulator alone "
        f"{parts['simulator'].median:.1f} ms."
    )
