"""Tests of the learning claims: each is trained with `corral train`, with several seeds."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks.common.children import failure
from benchmarks.common.cpp import SDK, CannotCompile, compile_simulator
from benchmarks.learning.claims import Claim
from corral.core.errors import RunFailed, UserError

_TIMEOUT_S = 2 * 3600.0
_EPISODES = 100
_SEARCHED = "search/simulator_steps"


@dataclass(frozen=True)
class Trial:
    """One run of a claim; `steps` and `seconds` are None if the bar was not reached."""

    seed: int
    steps: int | None
    seconds: float | None
    final: float
    """The measure at the end of the run."""
    total_s: float
    bytes_per_update: float | None = None
    """Bytes sent by one of several learners."""
    simulator_steps: int | None = None
    """Simulator steps used by searches until the bar was reached."""
    won: float | None = None
    """For games: fraction of the last evaluation's episodes that were won."""
    precision: str | None = None
    """Where precisions are compared: that of the image encoder, which `auto` chose."""


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
    """Train every claim with every seed into `folder`, with `jobs` concurrent runs.

    Claims that differ only in their measure share a run.
    """
    claims = list(claims)
    for name in sorted({claim.simulator for claim in claims} - {""}):
        say(f"compiling {name}")
        _compile(name, folder)
    runs: dict[tuple[str, ...], Path] = {}  # command -> run directory
    commands, findings = [], []
    for claim in claims:
        trials = []
        for seed in seeds[:1] if claim.once else seeds:
            what = tuple(claim.command(seed, folder / "run"))
            if what not in runs:
                runs[what] = folder / str(len(runs))
                commands.append((f"{claim.name}, seed {seed}", claim.command(seed, runs[what])))
            trials.append((claim, seed, runs[what]))
        findings.append(trials)
    _run_all(commands, jobs, say)
    return [Finding(trials[0][0], tuple(read_trial(*trial) for trial in trials)) for trials in findings]


def _compile(example: str, folder: Path) -> None:
    try:
        with_zmq = compile_simulator(SDK / "examples" / f"{example}.cpp", folder / example)
    except CannotCompile as error:
        raise UserError(
            f"The C++ simulator cannot be compiled: {error}; run this in a clone of the repository, with g++."
        ) from error
    if not with_zmq:
        raise UserError(
            "The C++ simulator cannot be compiled: pyzmq has no libzmq to link; install its wheel (pip install pyzmq)."
        )


def read_trial(claim: Claim, seed: int, run_dir: Path) -> Trial:
    """The results of a finished run."""
    from corral.runs.sinks.csv import read_metrics

    rows = read_metrics(run_dir)
    values = rows["train/return" if claim.measure == "train100" else "eval/return"].copy()
    if claim.measure == "train100":
        values[rows["train/episodes"] < _EPISODES] = math.nan
    in_time = (rows["env_steps"] <= claim.steps) & (rows["wall_s"] <= claim.within_s)
    reached = np.flatnonzero((values >= claim.bar) & in_time)
    known = values[~np.isnan(values)]
    return Trial(
        seed,
        int(rows["env_steps"][reached[0]]) if len(reached) else None,
        float(rows["wall_s"][reached[0]]) if len(reached) else None,
        float(known[-1]) if len(known) else math.nan,
        float(rows["wall_s"][-1]),
        float(rows["exchange/bytes_per_update"][-1]) if "exchange/bytes_per_update" in rows else None,
        int(rows[_SEARCHED][reached[0]]) if _SEARCHED in rows and len(reached) else None,
        float(np.mean([outcome > 0 for outcome in _saved(run_dir)["evaluation"]["returns"]])) if claim.game else None,
        _saved(run_dir)["precision"] if claim.table == "precision" else None,
    )


def _saved(run_dir: Path) -> dict[str, Any]:
    """What the last checkpoint says of the run."""
    from corral.runs.checkpoints import checkpoint
    from corral.runs.folder import RunFolder

    _, meta = checkpoint.load(RunFolder.open(run_dir), "latest", only=checkpoint.POLICY)
    return meta


@dataclass
class _Run:
    """A training process and its stderr."""

    name: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    until: float = field(default_factory=lambda: time.monotonic() + _TIMEOUT_S)

    @classmethod
    def start(cls, name: str, command: Sequence[str]) -> _Run:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        return cls(name, process, errors)

    def over(self) -> bool:
        """Whether it has finished; RunFailed if it failed or takes too long."""
        if self.process.poll() is None:
            if time.monotonic() > self.until:
                raise RunFailed(f"{self.name} took more than {_TIMEOUT_S:.0f} s.")
            return False
        if self.process.returncode:
            self.errors.seek(0)
            raise RunFailed(f"{self.name} failed: {failure(self.errors.read())}")
        return True

    def end(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.process.wait()
        self.errors.close()


def _run_all(commands: Sequence[tuple[str, list[str]]], jobs: int, say: Callable[[str], None]) -> None:
    """Run all commands, `jobs` at a time; none is left running afterwards."""
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
