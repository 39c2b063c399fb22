"""`corral bench link`: rows per second of external simulators, beside what users write themselves, in one run."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from corral.cli import bench_parts as parts

if TYPE_CHECKING:
    from corral.bench.report import Report
    from corral.cli.doctor import Machine


_MAX_OTHERS = 0.15  # share of the CPU


@dataclass(frozen=True)
class BenchLink:
    """Measure rows per second of external simulators over the link, beside REQ/REP with JSON, gRPC and RLlib.

    Interleaved rounds; prints tables, and writes link.png and link.json. What is not installed is skipped. A C++
    compiler is used if there is one.
    """

    case: Literal["single", "sims", "many", "rows", "images", "all"] = "all"
    """1, 8 in simulators of their own, or 64 environments of 4 floats, 256 of 84 floats, 32 of images."""
    rounds: int = 5
    """Slices of everybody."""
    seconds: float = 1.5
    """Length of a slice."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""
    table: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File to write the tables to, between its markers, such as BENCHMARKS.md; the picture goes to docs/ beside it."""

    def run(self) -> int:
        """Measure, print, and write the files."""
        parts.require_at_least_one(rounds=self.rounds)
        parts.require_seconds(self.seconds)
        parts.require_folder(self.out)
        from corral.bench.facts import CpuTimes
        from corral.bench.link import CASES, JSON, SCALE, make_cases
        from corral.bench.link_report import notes, tables
        from corral.bench.link_sims import compile_noop
        from corral.bench.report import CaseReport, Report, print_verdicts
        from corral.bench.rounds import play
        from corral.cli.console import make_console
        from corral.cli.doctor import look

        logging.getLogger("corral").setLevel(logging.WARNING)
        console = make_console()
        with parts.progress() as say, tempfile.TemporaryDirectory(prefix="corral-link-") as folder:
            say("looking at the machine")
            machine = look()
            report = Report(asdict(self) | {"out": str(self.out), "table": None}, parts.machine_facts(machine))
            say("compiling the simulator")
            noop = compile_noop(Path(folder))
            for case in make_cases(list(CASES) if self.case == "all" else [self.case], noop):
                before = CpuTimes.now()
                outcome = play(case.entries, self.rounds, self.seconds, parts.labelled(say, case.label))
                after = CpuTimes.now()
                others = after.others_since(before) if before and after else None
                layers = case.layers(outcome)
                found = case.verdicts(outcome, layers)
                report.cases.append(CaseReport(case, outcome, layers, found, others, JSON, SCALE))
                say("")
                print("\n".join([*tables(report.cases[-1:]), ""]), flush=True)
        print("\n".join(notes(noop, report.cases)))
        print_verdicts(console, report.cases)
        console.print(parts.machine_line(report, machine))
        if warning := busy(report):
            console.print(warning, style="yellow")
        console.print(parts.write_files(report, self.out, "link"))
        if self.table is not None:
            self._write_table(self.table, report, machine, noop)
        return 0

    def _write_table(self, path: Path, report: Report, machine: Machine, noop: object) -> None:
        from corral.bench.chart import save_chart
        from corral.bench.link_report import picture_place, relative, section, write_section
        from corral.bench.link_sims import Noop

        assert isinstance(noop, Noop)
        picture: Path | None = None
        with contextlib.suppress(ImportError):
            save_chart(report, picture_place(path))
            picture = picture_place(path)
        given = {"case": self.case, "rounds": self.rounds, "seconds": self.seconds}
        options = "".join(f" --{name} {value}" for name, value in given.items() if value != getattr(type(self), name))
        shown = relative(picture, path) if picture else None
        line = parts.machine_line(report, machine)
        write_section(path, section(report.cases, noop, report.facts, f"corral bench link{options}", line, shown))
        print(f"Wrote {path}" + (f" and {picture}." if picture else "."))


def busy(report: Report) -> str | None:
    """A word about other programs, where they make the figures worth less."""
    others = max((case.others or 0.0 for case in report.cases), default=0.0)
    if others <= _MAX_OTHERS:
        return None
    return (
        f"Other programs used {100 * others:.0f} % of the CPU meanwhile: these figures are worth little; measure again "
        "on an idle machine."
    )
