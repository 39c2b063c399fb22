"""`python -m benchmarks link`: rows per second of external simulators, compared with other ways to connect them."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from benchmarks.common.chart import save_chart
from benchmarks.common.command import (
    given_options,
    machine_line,
    measure,
    open_report,
    progress,
    require_interleaved,
    write_files,
)  # fmt: skip
from benchmarks.common.markdown import picture_place, relative, write_between
from benchmarks.common.report import Report, print_verdicts
from benchmarks.link.cases import CASES, make_cases
from benchmarks.link.report import MARKS, notes, section, tables
from benchmarks.link.sims import Noop, compile_noop
from corral.cli.console import make_console
from corral.cli.doctor import Machine

_MAX_OTHERS = 0.15  # CPU share of other programs


@dataclass(frozen=True)
class BenchLink:
    """Measure rows per second of external simulators over the link, compared with REQ/REP with JSON, gRPC and RLlib.

    Measures in interleaved rounds, prints tables, and writes link.png and link.json. Libraries that are not installed
    are skipped. Simulators are compiled if there is a C++ compiler.
    """

    case: Literal["single", "sims", "many", "rows", "images", "all"] = "all"
    """single: 1 environment of 4 floats; sims: 8 such simulators; many: 64 environments of 4 floats; rows: 256 of 84
    floats; images: 32 of images."""
    rounds: int = 5
    """Number of rounds; every contestant runs in each."""
    seconds: float = 1.5
    """Seconds per contestant and round."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""
    table: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Also write the tables between the markers of this file, such as BENCHMARKS.md; the chart goes to docs/ beside
    it."""

    def run(self) -> int:
        require_interleaved(self)
        console = make_console()
        with progress() as say, tempfile.TemporaryDirectory(prefix="corral-link-") as folder:
            report, machine = open_report(asdict(self) | {"out": str(self.out), "table": None}, say)
            say("compiling the simulator")
            noop = compile_noop(Path(folder))
            for case in make_cases(list(CASES) if self.case == "all" else [self.case], noop):
                report.cases.append(measure(case, self, say))
                say("")
                print("\n".join([*tables(report.cases[-1:]), ""]), flush=True)
        print("\n".join(notes(noop, report.cases)))
        print_verdicts(console, report.cases)
        console.print(machine_line(report, machine))
        if warning := busy(report):
            console.print(warning, style="yellow")
        console.print(write_files(report, self.out, "link"))
        if self.table is not None:
            self._write_table(self.table, report, machine, noop)
        return 0

    def _write_table(self, path: Path, report: Report, machine: Machine, noop: Noop) -> None:
        picture: Path | None = None
        with contextlib.suppress(ImportError):
            save_chart(report, picture_place(path, "link.png"))
            picture = picture_place(path, "link.png")
        options = given_options(self, "case", "rounds", "seconds")
        shown = relative(picture, path) if picture else None
        line = machine_line(report, machine)
        lines = section(report.cases, noop, report.facts, f"python -m benchmarks link{options}", line, shown)
        write_between(path, MARKS, lines)
        print(f"Wrote {path}" + (f" and {picture}." if picture else "."))


def busy(report: Report) -> str | None:
    """A warning if other programs used much of the CPU."""
    others = max((case.others or 0.0 for case in report.cases), default=0.0)
    if others <= _MAX_OTHERS:
        return None
    return (
        f"Other programs used {100 * others:.0f} % of the CPU meanwhile, so these figures are not reliable; measure "
        "again on an idle machine."
    )
