"""`python -m benchmarks search`: simulations per second of tree search, compared with other libraries in one run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from benchmarks.common.command import (
    given_options,
    labelled,
    machine_line,
    measure,
    open_report,
    progress,
    require_at_least_one,
    require_interleaved,
    write_files,
)  # fmt: skip
from benchmarks.common.markdown import write_between
from benchmarks.common.report import Report, print_verdicts
from benchmarks.search.cases import CASES, PEERS, Lab, make_cases
from benchmarks.search.check import check
from benchmarks.search.remote import measure_remote
from benchmarks.search.report import MARKS, headline, notes, remote_table, tables
from benchmarks.search.task import make_problem, save_problem
from corral.cli.console import make_console
from corral.core.errors import RunFailed, UserError


@dataclass(frozen=True)
class BenchSearch:
    """Measure simulations per second of tree search on Connect Four, compared with mctx, OpenSpiel and LightZero.

    First checks that all have the same rules and network outputs, and that they select the moves of a plain search.
    Measures in interleaved rounds, prints tables, and writes search.png and search.json. Libraries that are not
    installed are skipped.
    """

    case: Literal["network", "tree", "remote", "all"] = "all"
    """network: a network evaluates leaves; tree: only the tree and the game; remote: states in a C++ simulator over the
    link."""
    sims: int = 100
    """Simulations per decision."""
    rounds: int = 5
    """Number of rounds; every contestant runs in each."""
    seconds: float = 1.0
    """Seconds per contestant and round."""
    peer_python: Path = Path(sys.executable)
    """Python interpreter with the other libraries, NumPy, numba and gymnasium."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""
    table: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Also write the tables between the markers of this file, such as BENCHMARKS.md."""

    def run(self) -> int:
        require_at_least_one(sims=self.sims)
        require_interleaved(self)
        console, lines = make_console(), list[str]()
        with progress() as say, tempfile.TemporaryDirectory(prefix="corral-search-") as folder:
            settings = asdict(self) | {"out": str(self.out), "peer_python": "", "table": None}
            report, machine = open_report(settings, say)
            if self.case != "remote":
                lines += self._compare(report, Path(folder), say)
            if self.case in ("remote", "all"):
                lines += self._over_the_link(Path(folder), say)
        print_verdicts(console, report.cases)
        line = machine_line(report, machine)
        console.print(line)
        console.print(write_files(report, self.out, "search"))
        if self.table is not None:
            self._write_table(self.table, report, lines, line)
        return 0

    def _compare(self, report: Report, folder: Path, say: Callable[[str], None]) -> list[str]:
        """Check all engines, measure them, and print the results; returns their lines for the table."""
        problem, file = make_problem(), folder / "problem.npz"
        save_problem(problem, file)
        with Lab(file, str(self.peer_python)) as lab:
            checks = check(problem, lab.engine, ["corral", *PEERS], self.sims, say)
            if checks.failures:
                raise RunFailed(f"The engines differ, so their speed cannot be compared: {'; '.join(checks.failures)}.")
            names = [name for name in CASES if self.case in ("all", name)]
            for case in make_cases(names, self.sims, lab, self.seconds):
                report.cases.append(measure(case, self, say, lab.cpu_times))
                say("")
                print("\n".join([*tables(report.cases[-1:]), ""]), flush=True)
            engines = lab.facts()
        report.more |= {"checks": checks.to_json(), "engines": engines}
        remarks = notes(checks, engines, report.cases)
        print("\n".join([*remarks, ""]), flush=True)
        return [*remarks, "", *tables(report.cases), ""]

    def _over_the_link(self, folder: Path, say: Callable[[str], None]) -> list[str]:
        """The table for states in a simulator, or why it was skipped."""
        try:
            figures, cost = measure_remote(folder, self.rounds, self.seconds, labelled(say, "over the link"))
            lines = remote_table(figures, cost)
        except UserError as error:
            lines = [f"Skipped: states over the link, {error}"]
        say("")
        print("\n".join([*lines, ""]), flush=True)
        return [*lines, ""]

    def _write_table(self, path: Path, report: Report, lines: list[str], machine: str) -> None:
        options = given_options(self, "case", "sims", "rounds", "seconds")
        verdicts = [f"- {verdict}" for case in report.cases for verdict in case.verdicts]
        head = headline(f"python -m benchmarks search{options}", report.facts, machine)
        write_between(path, MARKS, [head, "", *lines, *verdicts])
        print(f"Wrote {path}.")
