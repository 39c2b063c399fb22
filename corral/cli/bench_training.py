"""`corral bench training`: steps per second of training, beside other libraries, in one run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from corral.cli import bench_parts as parts

if TYPE_CHECKING:
    from rich.console import Console

    from corral.bench.report import CaseReport, Report
    from corral.bench.scaling import ScalingCase
    from corral.bench.training import TrainingCase


@dataclass(frozen=True)
class BenchTraining:
    """Measure steps per second of training beside other libraries, in interleaved rounds.

    Prints tables, and writes training.png and training.json. A library that is not installed is skipped.
    """

    case: Literal["all", "ppo", "a2c", "dqn", "appo", "impala", "sleep", "central", "central-pong", "time-to-475"] = (
        "all"
    )
    """An algorithm's speed, environments that sleep, central inference against local policies, the time that PPO takes
    to learn CartPole, or all of them."""
    rounds: int = 5
    """Slices of everybody; of the time to learn, seeds."""
    seconds: float = 5.0
    """Length of a slice."""
    sample_factory: Path = Path(sys.executable)
    """The Python that has Sample Factory, which needs older packages than Corral."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""

    def run(self) -> int:
        """Measure, print, and write the files."""
        parts.require_at_least_one(rounds=self.rounds)
        parts.require_seconds(self.seconds)
        parts.require_folder(self.out)
        from corral.bench.report import Report, print_case, print_verdicts
        from corral.cli.console import make_console
        from corral.cli.doctor import look

        logging.getLogger("corral").setLevel(logging.WARNING)
        console = make_console()
        with parts.progress() as say:
            say("looking at the machine")
            machine = look()
            report = Report(
                asdict(self) | {"out": str(self.out), "sample_factory": str(self.sample_factory)},
                parts.machine_facts(machine),
            )
            for case in self._measure(say):
                report.cases.append(case)
                say("")
                print_case(console, case)
            if self.case in ("all", "time-to-475"):
                self._race(report, console, say)
        if report.cases:
            print_verdicts(console, report.cases)
        console.print(parts.machine_line(report, machine))
        console.print(parts.write_files(report, self.out, "training"))
        return 0

    def _measure(self, say: Callable[[str], None]) -> Iterator[CaseReport]:
        from corral.bench.facts import CpuTimes
        from corral.bench.report import CaseReport
        from corral.bench.rounds import play

        for case in self._cases():
            before = CpuTimes.now()
            outcome = play(case.entries, self.rounds, self.seconds, parts.labelled(say, case.label))
            after = CpuTimes.now()
            others = after.others_since(before) if before and after else None
            layers = case.layers(outcome)
            verdicts = case.verdicts(outcome, layers)
            yield CaseReport(case, outcome, layers, verdicts, others, case.base(outcome), case.scale)

    def _cases(self) -> Iterator[TrainingCase | ScalingCase]:
        from corral.bench import scaling, training

        for name in training.CASES:
            if self.case in ("all", name):
                yield training.make_case(name)
        for scaled in scaling.CASES:
            if self.case in ("all", scaled):
                yield scaling.make_case(scaled, str(self.sample_factory))

    def _race(self, report: Report, console: Console, say: Callable[[str], None]) -> None:
        from corral.bench.time_to_score import print_race, race

        result = race(range(1, self.rounds + 1), say)
        say("")
        print_race(console, result)
        report.more["time_to_475"] = result.to_json()
