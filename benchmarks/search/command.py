"""`python -m benchmarks search`: simulations per second of tree search, beside other libraries, in one run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from benchmarks.common.command import (
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
from benchmarks.search.case import CASES, PEERS, Lab, make_cases
from benchmarks.search.check import check
from benchmarks.search.remote import measure_remote
from benchmarks.search.report import MARKS, headline, notes, remote_table, tables
from benchmarks.search.task import make_problem, save_problem
from corral.cli.console import make_console
from corral.core.errors import RunFailed, UserError


@dataclass(frozen=True)
class BenchSearch:
    """Measure simulations per second of tree search on Connect Four, beside mctx, OpenSpiel and LightZero.

    First all must know the same rules, compute the same network, and choose as a plain search does. Interleaved rounds;
    prints tables, and writes search.png and search.json. A library that is not installed is skipped.
    """

    case: Literal["network", "tree", "remote", "all"] = "all"
    """Leaves that a network evaluates, none but the tree and the game, or states in a C++ simulator over the link."""
    sims: int = 100
    """Simulations of a decision."""
    rounds: int = 5
    """How often every contestant runs."""
    seconds: float = 1.0
    """How long it runs each time."""
    peer_python: Path = Path(sys.executable)
    """The Python that has the other libraries, with NumPy, numba and gymnasium."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""
    table: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File to write the tables to, between its markers, such as BENCHMARKS.md."""

    def run(self) -> int:
        """Check, measure, print, and write the files."""
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
        """Check all engines, measure them, and print what was found; returns that for the table."""
        problem, file = make_problem(), folder / "problem.npz"
        save_problem(problem, file)
        with Lab(file, str(self.peer_python)) as lab:
            checks = check(problem, lab.engine, ["corral", *PEERS], self.sims, say)
            if checks.failures:
                raise RunFailed(f"Speed means nothing before this is right: {'; '.join(checks.failures)}.")
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
        """The table of states in a simulator, or why there is none."""
        try:
            figures, cost = measure_remote(folder, self.rounds, self.seconds, labelled(say, "over the link"))
            lines = remote_table(figures, cost)
        except UserError as error:
            lines = [f"Left out: states over the link, {error}"]
        say("")
        print("\n".join([*lines, ""]), flush=True)
        return [*lines, ""]

    def _write_table(self, path: Path, report: Report, lines: list[str], machine: str) -> None:
        given = {"case": self.case, "sims": self.sims, "rounds": self.rounds, "seconds": self.seconds}
        options = "".join(f" --{name} {value}" for name, value in given.items() if value != getattr(type(self), name))
        verdicts = [f"- {verdict}" for case in report.cases for verdict in case.verdicts]
        head = headline(f"python -m benchmarks search{options}", report.facts, machine)
        write_between(path, MARKS, [head, "", *lines, *verdicts])
        print(f"Wrote {path}.")
