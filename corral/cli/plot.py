"""`corral plot`: learning curves of runs as PNG and CSV."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from corral.cli.options import Count, OptionalReal


@dataclass(frozen=True)
class Plot:
    """Plot a metric of one or several runs; runs that differ only in their seed become a mean with a band.

    Writes a PNG, and a CSV of the curves beside it.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="DIR...", help_behavior_hint="(required)")
    ]
    """Run directories."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = Path("curve.png")
    """PNG to write."""
    metric: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of metrics.csv to draw. Default: eval/return, or train/return if a run has fewer than two evaluations."""
    x: Literal["env_steps", "wall_s", "episodes"] = "env_steps"
    """Horizontal axis."""
    smooth: Count = 1
    """Window of the moving average, in rows."""
    threshold: OptionalReal = None
    """Value to mark by a line, such as the return at which a task counts as solved."""

    def run(self) -> int:
        from corral.config.migrate import metric_name
        from corral.runs.views.plot import default_metric, draw

        metric = default_metric(self.runs) if self.metric is None else metric_name(self.metric)
        for curve in draw(self.runs, self.out, metric=metric, x=self.x, smooth=self.smooth, threshold=self.threshold):
            runs = f"{curve.runs} runs" if curve.runs > 1 else "1 run"
            print(f"{curve.label}: {runs}, {metric} {curve.mean[-1]:.4g} at {self.x} {curve.x[-1]:,.0f}")
        print(f"Wrote {self.out} and {self.out.with_suffix('.csv')}.")
        return 0
