"""`corral plot`: learning curves of runs as PNG and CSV."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from corral.core.errors import UserError


@dataclass(frozen=True)
class Plot:
    """Draw a metric of one or several runs; runs that differ in their seed only become a mean with a band.

    Writes the PNG and, beside it, a CSV of what is drawn.
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="DIR...")]
    """Run directories."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("curve.png")
    """PNG to write."""
    metric: str = "train/return"
    """Column of metrics.csv to draw."""
    x: Literal["env_steps", "wall_s", "episodes"] = "env_steps"
    """What is drawn from left to right."""
    smooth: int = 1
    """Rows whose mean is drawn at each row."""

    def run(self) -> int:
        """Read, draw and write."""
        self._check()
        from corral.runs.views.plot import curves, save_csv, save_png

        found = curves(self.runs, self.metric, self.x, self.smooth)
        table = self.out.with_suffix(".csv")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            save_png(found, self.out, self.metric, self.x, self.smooth)
            save_csv(found, table, self.metric, self.x)
        except OSError as error:
            raise UserError(f"{error.filename or self.out} cannot be written: {error.strerror}.") from error
        for curve in found:
            runs = f"{curve.runs} runs" if curve.runs > 1 else "1 run"
            print(f"{curve.label}: {runs}, {self.metric} {curve.mean[-1]:.4g} at {self.x} {curve.x[-1]:,.0f}")
        print(f"Wrote {self.out} and {table}.")
        return 0

    def _check(self) -> None:
        if not self.runs:
            raise UserError("`corral plot` needs at least one run directory.")
        if self.out.suffix.lower() != ".png":
            raise UserError(f"--out must end in .png, got {self.out}.")
        if self.smooth < 1:
            raise UserError(f"--smooth must be at least 1, got {self.smooth}.")
        if self.out.stem == "metrics" and (self.out.parent / "run.json").exists():
            raise UserError(f"--out {self.out} would replace the run's own metrics.csv: give another name.")
