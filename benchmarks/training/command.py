"""`python -m benchmarks training`: steps per second of training, compared with other libraries in one run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from benchmarks.common.command import Say, require_interleaved, run_cases
from benchmarks.common.report import Report
from benchmarks.training import cases, scaling, side_by_side
from benchmarks.training.time_to_score import print_race, race


@dataclass(frozen=True)
class BenchTraining:
    """Measure steps per second of training, compared with other libraries in interleaved rounds.

    Prints tables, and writes training.png and training.json. A library that is not installed is skipped.
    """

    case: Literal[
        "all", "ppo", "a2c", "dqn", "appo", "impala", "sleep", "central", "central-pong", "time-to-475", "side-by-side"
    ] = "all"
    """An algorithm: its speed; sleep: environments that sleep; central: central inference compared with local policies;
    time-to-475: time that PPO needs to learn CartPole; side-by-side: two runs on images and two on CartPole at once."""
    rounds: int = 5
    """Number of rounds; every contestant runs in each. For time-to-475: number of seeds."""
    seconds: float = 5.0
    """Seconds per contestant and round."""
    sample_factory: Path = Path(sys.executable)
    """Python interpreter with Sample Factory, which needs older packages than Corral."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""

    def run(self) -> int:
        require_interleaved(self)
        settings = asdict(self) | {"out": str(self.out), "sample_factory": str(self.sample_factory)}
        return run_cases("training", settings, self, self._cases(), self._more)

    def _cases(self) -> Iterator[cases.TrainingCase | scaling.ScalingCase]:
        for name in cases.CASES:
            if self.case in ("all", name):
                yield cases.make_case(name)
        for scaled in scaling.CASES:
            if self.case in ("all", scaled):
                yield scaling.make_case(scaled, str(self.sample_factory))

    def _more(self, report: Report, console: Console, say: Say) -> None:
        if self.case in ("all", "time-to-475"):
            self._race(report, console, say)
        if self.case in ("all", "side-by-side"):
            together = side_by_side.measure(self.rounds, self.seconds, say)
            say("")
            side_by_side.print_shares(console, together)
            report.more["side_by_side"] = together.to_json()

    def _race(self, report: Report, console: Console, say: Say) -> None:
        result = race(range(1, self.rounds + 1), say)
        say("")
        print_race(console, result)
        report.more["time_to_475"] = result.to_json()
