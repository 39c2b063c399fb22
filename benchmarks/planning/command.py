"""`python -m benchmarks planning`: what planning adds when acting, with a half-trained policy and without one."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from benchmarks.common.command import (
    given_options,
    machine_line,
    open_report,
    progress,
    require_at_least_one,
    require_folder,
)  # fmt: skip
from benchmarks.common.markdown import picture_place, relative, write_between
from benchmarks.common.report import Report
from benchmarks.planning.cases import (
    AHEAD,
    TASKS,
    PlanningFigure,
    compile_pendulum,
    half_trained,
    planners,
    verdicts,
)  # fmt: skip
from benchmarks.planning.report import MARKS, save_curves, section
from corral.core.errors import UserError

_MIN_BUDGET = 40


@dataclass(frozen=True)
class BenchPlanning:
    """Measure the return of a half-trained PPO with search, for several numbers of simulations.

    It is compared with planners that do not learn: shooting, search with random rollouts, and MPPI, also on a C++
    simulator. Prints a table, and writes planning.png and planning.json.
    """

    task: Literal["cartpole", "pendulum", "all"] = "all"
    """Task to measure. Default: both."""
    sims: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128)
    """Numbers of simulations per decision."""
    budget: int = 640
    """Approximate simulator steps per decision of planners that do not learn."""
    episodes: int = 32
    """Episodes per figure and seed."""
    seeds: int = 3
    """Number of seeds, starting at 1."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""
    table: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Also write the table between the markers of this file, such as BENCHMARKS.md; the chart goes to docs/ beside
    it."""

    def run(self) -> int:
        require_at_least_one(seeds=self.seeds, sims=min(self.sims, default=0))
        if self.episodes < 2:
            raise UserError(f"--episodes must be at least 2, for a confidence interval, got {self.episodes}.")
        if self.budget < _MIN_BUDGET:
            raise UserError(
                f"--budget must be at least {_MIN_BUDGET}, for two rollouts of 20 steps, got {self.budget}."
            )
        require_folder(self.out)
        figures: list[PlanningFigure] = []
        seeds, simulations = range(1, self.seeds + 1), self.budget // AHEAD
        with progress() as say, tempfile.TemporaryDirectory(prefix="corral-planning-") as folder:
            report, machine = open_report(asdict(self) | {"out": str(self.out), "table": None}, say)
            pendulum = None if self.task == "cartpole" else compile_pendulum(Path(folder))
            for task in [task for name, task in TASKS.items() if self.task in (name, "all")]:
                figures += half_trained(task, seeds, sorted(set(self.sims)), self.episodes, Path(folder), say)
                figures += planners(task, seeds, simulations, self.episodes, pendulum, say)
        self._write(figures, report, machine_line(report, machine))
        return 0

    def _write(self, figures: list[PlanningFigure], report: Report, machine: str) -> None:
        report.more["figures"] = [asdict(figure) for figure in figures]
        report.more["verdicts"] = [asdict(found) | {"reached": found.reached} for found in verdicts(figures)]
        (self.out / "planning.json").write_text(json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")
        place = picture_place(self.table, "planning.png") if self.table else self.out / "planning.png"
        picture = self._draw(figures, place)
        how = f"{self.episodes} episodes per seed from 1 to {self.seeds}, the same for all except C++ simulators."
        shown = relative(picture, self.table) if picture and self.table else None
        lines = section(figures, report.facts, self._command(), machine, how, shown)
        print("\n".join(lines))
        written = [self.out / "planning.json", *([picture] if picture else [])]
        if self.table is not None:
            write_between(self.table, MARKS, lines)
            written.append(self.table)
        missing = "" if picture else " No PNG: matplotlib is missing, pip install 'corral-rl[plot]'."
        print(f"Wrote {', '.join(map(str, written))}.{missing}")

    def _draw(self, figures: list[PlanningFigure], path: Path) -> Path | None:
        try:
            save_curves(figures, path, self._command())
        except ImportError:
            return None
        return path

    def _command(self) -> str:
        return f"python -m benchmarks planning{given_options(self, 'task', 'sims', 'budget', 'episodes', 'seeds')}"
