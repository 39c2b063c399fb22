"""`corral bench replay`: prioritised replay beside other libraries, in one run."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from corral.cli import bench_parts as parts


@dataclass(frozen=True)
class BenchReplay:
    """Measure transitions per second of prioritised replay beside other libraries, in interleaved rounds.

    Prints tables, and writes replay.png and replay.json. A library that is not installed is skipped.
    """

    rounds: int = 5
    """Slices of everybody."""
    seconds: float = 1.0
    """Length of a slice."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""

    def run(self) -> int:
        """Measure, print, and write the files."""
        parts.require_at_least_one(rounds=self.rounds)
        parts.require_seconds(self.seconds)
        parts.require_folder(self.out)
        from corral.bench.facts import CpuTimes
        from corral.bench.replay import CPPRB, SCALE, make_cases
        from corral.bench.report import CaseReport, Report, print_case, print_verdicts
        from corral.bench.rounds import play
        from corral.cli.console import make_console
        from corral.cli.doctor import look

        logging.getLogger("corral").setLevel(logging.WARNING)
        console = make_console()
        with parts.progress() as say:
            say("looking at the machine")
            machine = look()
            report = Report(asdict(self) | {"out": str(self.out)}, parts.machine_facts(machine))
            for case in make_cases():
                before = CpuTimes.now()
                outcome = play(case.entries, self.rounds, self.seconds, parts.labelled(say, case.label))
                after = CpuTimes.now()
                others = after.others_since(before) if before and after else None
                report.cases.append(CaseReport(case, outcome, [], case.verdicts(outcome), others, CPPRB, SCALE))
                say("")
                print_case(console, report.cases[-1])
        print_verdicts(console, report.cases)
        console.print(parts.machine_line(report, machine))
        console.print(parts.write_files(report, self.out, "replay"))
        return 0
