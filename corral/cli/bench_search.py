"""`corral bench search`: simulations per second of tree search, beside other libraries, in one run."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from corral.cli import bench_parts as parts
from corral.core.errors import RunFailed, UserError

if TYPE_CHECKING:
    from corral.bench.report import Report


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
    """Slices of everybody."""
    seconds: float = 1.0
    """Length of a slice."""
    peer_python: Path = Path(sys.executable)
    """The Python that has the other libraries, with NumPy, numba and gymnasium."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""
    table: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File to write the tables to, between its markers, such as BENCHMARKS.md."""

    def run(self) -> int:
        """Check, measure, print, and write the files."""
        parts.require_at_least_one(rounds=self.rounds, sims=self.sims)
        parts.require_seconds(self.seconds)
        parts.require_folder(self.out)
        from corral.bench.report import Report, print_verdicts
        from corral.cli.console import make_console
        from corral.cli.doctor import look

        logging.getLogger("corral").setLevel(logging.WARNING)
        console, lines = make_console(), list[str]()
        with parts.progress() as say, tempfile.TemporaryDirectory(prefix="corral-search-") as folder:
            say("looking at the machine")
            machine = look()
            settings = asdict(self) | {"out": str(self.out), "peer_python": "", "table": None}
            report = Report(settings, parts.machine_facts(machine))
            if self.case != "remote":
                lines += self._compare(report, Path(folder), say)
            if self.case in ("remote", "all"):
                lines += self._over_the_link(Path(folder), say)
        print_verdicts(console, report.cases)
        line = parts.machine_line(report, machine)
        console.print(line)
        console.print(parts.write_files(report, self.out, "search"))
        if self.table is not None:
            self._write_table(self.table, report, lines, line)
        return 0

    def _compare(self, report: Report, folder: Path, say: Callable[[str], None]) -> list[str]:
        """Check all engines, measure them, and print what was found; returns that for the table."""
        from corral.bench.report import CaseReport
        from corral.bench.rounds import play
        from corral.bench.search import CASES, PEERS, SCALE, Lab, make_cases
        from corral.bench.search_check import check
        from corral.bench.search_report import notes, tables
        from corral.bench.search_task import make_problem, save_problem

        problem, file = make_problem(), folder / "problem.npz"
        save_problem(problem, file)
        with Lab(file, str(self.peer_python)) as lab:
            checks = check(problem, lab.engine, ["corral", *PEERS], self.sims, say)
            if checks.failures:
                raise RunFailed(f"Speed means nothing before this is right: {'; '.join(checks.failures)}.")
            for case in make_cases([name for name in CASES if self.case in ("all", name)], self.sims, lab):
                before = lab.cpu_times()
                outcome = play(case.entries, self.rounds, self.seconds, parts.labelled(say, case.label))
                after = lab.cpu_times()
                others = after.others_since(before) if before and after else None
                layers = case.layers(self.seconds)
                found = case.verdicts(outcome, layers)
                report.cases.append(CaseReport(case, outcome, layers, found, others, case.base(outcome), SCALE))
                say("")
                print("\n".join([*tables(report.cases[-1:]), ""]), flush=True)
            engines = lab.facts()
        report.more |= {"checks": checks.to_json(), "engines": engines}
        words = notes(checks, engines, report.cases)
        print("\n".join([*words, ""]), flush=True)
        return [*words, "", *tables(report.cases), ""]

    def _over_the_link(self, folder: Path, say: Callable[[str], None]) -> list[str]:
        """The table of states in a simulator, or why there is none."""
        from corral.bench.search_remote import measure
        from corral.bench.search_report import remote_table

        try:
            figures, cost = measure(folder, self.rounds, self.seconds, parts.labelled(say, "over the link"))
            lines = remote_table(figures, cost)
        except UserError as error:
            lines = [f"Left out: states over the link, {error}"]
        say("")
        print("\n".join([*lines, ""]), flush=True)
        return [*lines, ""]

    def _write_table(self, path: Path, report: Report, lines: list[str], machine: str) -> None:
        from corral.bench.markdown import write_between
        from corral.bench.search_report import MARKS, headline

        given = {"case": self.case, "sims": self.sims, "rounds": self.rounds, "seconds": self.seconds}
        options = "".join(f" --{name} {value}" for name, value in given.items() if value != getattr(type(self), name))
        verdicts = [f"- {verdict}" for case in report.cases for verdict in case.verdicts]
        head = headline(f"corral bench search{options}", report.facts, machine)
        write_between(path, MARKS, [head, "", *lines, *verdicts])
        print(f"Wrote {path}.")
