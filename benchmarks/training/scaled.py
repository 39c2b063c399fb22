"""Topologies with actors as contestants, and the CPU time of their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.contestants import timed
from benchmarks.common.rounds import Slice
from benchmarks.sampling.loops import Loops
from corral.config.experiment import Experiment
from corral.topologies.base import Topology, make_topology


@dataclass
class Usage:
    """CPU seconds of actors and of the learner, over all slices."""

    steps: int = 0
    seconds: float = 0.0
    acting: float = 0.0
    learning: float = 0.0

    def add(self, done: Slice, acting: float, learning: float = 0.0) -> None:
        self.steps += done.steps
        self.seconds += done.seconds
        self.acting += acting
        self.learning += learning


class Scaled:
    """A topology as `corral train` runs it; its actors pause when the learner takes no data."""

    def __init__(self, algo: str, env: str, usage: Usage | None = None, **settings: Any):
        given = {"steps": 10**9, **settings}
        experiment = Experiment.make(algo, env, preset="none", overrides=given)
        self._topology: Topology = make_topology(experiment, note=lambda kind, text: None)
        self._usage = usage or Usage()
        # Every actor is at most two fragments ahead.
        self._ahead = 2 * experiment.num_envs * self._topology.algo.fragment_steps(experiment.num_envs)
        self.close = self._topology.close

    def run(self, seconds: float) -> Slice:
        """Learn from the data made in the pause, which is not counted; then measure."""
        taken = 0
        while taken < self._ahead:
            taken += self._turn()
        pids = [part["pid"] for part in self._topology.processes()]
        acting, learning = cpu_s(pids), time.process_time()
        done = timed(self._turn, seconds)
        self._usage.add(done, cpu_s(pids) - acting, time.process_time() - learning)
        return done

    def _turn(self) -> int:
        before = self._topology.env_steps
        while self._topology.env_steps == before:
            self._topology.advance()
        return self._topology.env_steps - before


class MeteredLoops(Loops):
    """Bare loops whose CPU time is recorded."""

    def __init__(self, usage: Usage, env: str, num_envs: int, workers: int):
        super().__init__(env, "bare", num_envs, workers)
        self._usage = usage

    def run(self, seconds: float) -> Slice:
        before = cpu_s(self.pids)
        done = super().run(seconds)
        self._usage.add(done, cpu_s(self.pids) - before)
        return done


def cpu_s(pids: Iterable[int | None]) -> float:
    """CPU seconds of these processes so far; 0 for a process that has ended or that the system does not report."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return float(ticks / os.sysconf("SC_CLK_TCK"))
