"""What Corral claims to learn, and whether it does: every claim is trained as a user would, over several seeds."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import numpy as np

from corral import presets
from corral.errors import RunFailed

_LOOKS = 200  # rows of metrics in a run, so that the step that reached the bar is known to half a percent
_PATIENCE_S = 3600.0
_EPISODES = 100


@dataclass(frozen=True)
class Claim:
    """`algo` reaches `bar` on `env` within `steps`, with the settings of its preset and `overrides`.

    `train100` is the mean return of the last 100 training episodes; `eval` that of an evaluation with the most
    likely actions and seeds of its own.
    """

    algo: str
    env: str
    measure: Literal["train100", "eval"]
    bar: float
    steps: int
    overrides: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    options: tuple[str, ...] = ()
    """More words of the command line."""
    once: bool = False
    """One seed is enough: the same claim stands on another runtime already."""
    table: Literal["learning", "sharing"] = "learning"
    """Which table of BENCHMARKS.md it belongs to."""

    @property
    def name(self) -> str:
        """Algorithm and environment, in a word each."""
        return f"{self.label or self.algo} {self.env.rpartition(':')[2]}"

    def command(self, seed: int, folder: Path) -> list[str]:
        """The `corral train` that tests it."""
        watching = {"log.every_steps": max(1, self.steps // _LOOKS), "log.every_s": 0, "checkpoints.every_s": 0}
        settings = [f"{key}={value}" for key, value in {**self.overrides, **watching}.items()]
        words = ["train", self.algo, "--env", self.env, "--steps", self.steps, "--seed", seed, "--run-dir", folder]
        words += self.options
        return [sys.executable, "-m", "corral", *map(str, words), "--quiet", "--set", *settings]


_RAY = ("--runtime", "ray", "--actors", "1")


def _sharing(algo: str, workers: int, label: str = "", times: int = 1, **overrides: str) -> Claim:
    """A claim of learners that share, within so many times the steps of their preset."""
    words: tuple[str, ...] = ("--actors", str(workers))
    if algo == "paac":  # its workers only act
        words, overrides = (), {"workers": str(workers)}
    steps = times * int(presets.PRESETS[algo, "CartPole-v1"].settings["steps"])
    name = label or f"{algo}, {workers} workers"
    return Claim(algo, "CartPole-v1", "train100", 450, steps, overrides, name, words, table="sharing")


CLAIMS = (
    Claim("ppo", "CartPole-v1", "train100", 475, 100_000),
    Claim("a2c", "CartPole-v1", "train100", 475, 500_000),
    Claim("reinforce", "CartPole-v1", "train100", 475, 500_000),
    Claim("dqn", "CartPole-v1", "eval", 475, 50_000),
    Claim("ppo", "Acrobot-v1", "train100", -100, 100_000),
    Claim("dqn", "Acrobot-v1", "train100", -100, 50_000),
    Claim("ppo", "Pendulum-v1", "eval", -200, 100_000, {"evaluation.episodes": "50"}),  # episodes differ by 100
    Claim("ppo", presets.MOVE_OR_SHOOT, "eval", 0.85, 100_000),
    Claim("ppo", presets.STATELESS, "train100", 300, 200_000, label="ppo lstm"),
    Claim("impala", "CartPole-v1", "train100", 450, 200_000),
    Claim("appo", "CartPole-v1", "train100", 450, 200_000),
    Claim("apex", "CartPole-v1", "eval", 450, 100_000),
    Claim("seed_impala", "CartPole-v1", "train100", 450, 200_000),
    Claim("impala", "CartPole-v1", "train100", 450, 200_000, label="impala, ray", options=_RAY, once=True),
    Claim("appo", "CartPole-v1", "train100", 450, 200_000, label="appo, ray", options=_RAY, once=True),
    Claim("apex", "CartPole-v1", "eval", 450, 100_000, label="apex, ray", options=_RAY, once=True),
    Claim("seed_impala", "CartPole-v1", "train100", 450, 200_000, label="seed_impala, ray", options=_RAY, once=True),
    *(_sharing(algo, workers) for algo in ("dppo", "a3c", "paac", "ppo-ssp", "gala") for workers in (2, 4)),
    _sharing("dppo", 2, "dppo, 2 workers, topk:0.01", 2, compress="topk:0.01"),
    _sharing("dppo", 2, "dppo, 2 workers, qsgd:8", compress="qsgd:8"),
    _sharing("dppo", 2, "dppo, 2 workers, powersgd:2", compress="powersgd:2"),
)
"""The tables of BENCHMARKS.md."""


@dataclass(frozen=True)
class Trial:
    """One run of a claim; `steps` and `seconds` are None where the bar was never reached."""

    seed: int
    steps: int | None
    seconds: float | None
    final: float
    """The measure at the end of the run."""
    total_s: float
    bytes_per_update: float | None = None
    """Of one learner, where several share."""


@dataclass(frozen=True)
class Finding:
    """All runs of a claim."""

    claim: Claim
    trials: Sequence[Trial]

    @property
    def held(self) -> bool:
        """Whether every seed reached the bar."""
        return all(trial.steps is not None for trial in self.trials)


def examine(
    claims: Iterable[Claim], seeds: Sequence[int], folder: Path, jobs: int, say: Callable[[str], None]
) -> list[Finding]:
    """Train every claim with every seed, `jobs` runs side by side, into `folder`."""
    claims = list(claims)
    chosen = [seeds[:1] if claim.once else seeds for claim in claims]
    paths = {(k, seed): folder / f"{k}-{seed}" for k in range(len(claims)) for seed in chosen[k]}
    commands = [(f"{claims[k].name}, seed {seed}", claims[k].command(seed, path)) for (k, seed), path in paths.items()]
    _run_all(commands, jobs, say)
    return [
        Finding(claim, tuple(read_trial(claim, seed, paths[k, seed]) for seed in chosen[k]))
        for k, claim in enumerate(claims)
    ]


def read_trial(claim: Claim, seed: int, run_dir: Path) -> Trial:
    """What a finished run came to."""
    from corral.runs.metrics import read_metrics

    rows = read_metrics(run_dir)
    values = rows["train/return" if claim.measure == "train100" else "eval/return"].copy()
    if claim.measure == "train100":
        values[rows["train/episodes"] < _EPISODES] = math.nan
    reached = np.flatnonzero((values >= claim.bar) & (rows["env_steps"] <= claim.steps))
    known = values[~np.isnan(values)]
    return Trial(
        seed,
        int(rows["env_steps"][reached[0]]) if len(reached) else None,
        float(rows["wall_s"][reached[0]]) if len(reached) else None,
        float(known[-1]) if len(known) else math.nan,
        float(rows["wall_s"][-1]),
        float(rows["exchange/bytes_per_update"][-1]) if "exchange/bytes_per_update" in rows else None,
    )


@dataclass
class _Run:
    """A process that trains, and what it says."""

    name: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    until: float = field(default_factory=lambda: time.monotonic() + _PATIENCE_S)

    @classmethod
    def start(cls, name: str, command: Sequence[str]) -> _Run:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        return cls(name, process, errors)

    def over(self) -> bool:
        """Whether it is done; RunFailed when it failed, or takes too long."""
        if self.process.poll() is None:
            if time.monotonic() > self.until:
                raise RunFailed(f"{self.name} took more than {_PATIENCE_S:.0f} s.")
            return False
        if self.process.returncode:
            self.errors.seek(0)
            last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise RunFailed(f"{self.name} failed: {last[0] if last else 'it does not say why'}")
        return True

    def end(self) -> None:
        """End it if it is not over."""
        self.process.kill()
        self.process.wait()
        self.errors.close()


def _run_all(commands: Sequence[tuple[str, list[str]]], jobs: int, say: Callable[[str], None]) -> None:
    """Run all commands, a few at a time; whatever happens, none goes on after this."""
    waiting, running = list(reversed(commands)), list[_Run]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Run.start(*waiting.pop()))
                say(f"{len(commands) - len(waiting)} of {len(commands)}: {running[-1].name}")
            time.sleep(0.1)
            for run in list(running):
                if run.over():
                    run.end()
                    running.remove(run)
    finally:
        for run in running:
            run.end()
