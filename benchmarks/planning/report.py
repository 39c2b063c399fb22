"""Results of `python -m benchmarks planning`: a table and a chart for BENCHMARKS.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.rounds import Spread
from benchmarks.planning.cases import POLICY, TASKS, PlanningFigure, verdicts

MARKS = ("<!-- planning table: written by `python -m benchmarks planning` -->", "<!-- end of the planning table -->")
_HEAD = ("task", "acts by", "mean return", "95 % interval", "ms per decision", "simulator steps per decision")
_COLOURS = ("#8d99ae", "#2a9d8f", "#e9a03b", "#6a4c93", "#1d6fa5")
_OURS = "#d1495b"


def tables(figures: Sequence[PlanningFigure]) -> list[str]:
    """A row per way to act: medians and ranges over the seeds."""
    return table(_HEAD, [_row(figure) for figure in figures])


def section(
    figures: Sequence[PlanningFigure], facts: dict[str, Any], command: str, machine: str, how: str, picture: str | None
) -> list[str]:
    """The table with the conditions under which it was measured."""
    versions = ", ".join(f"{name} {facts['versions'][name]}" for name in ("corral-rl", "torch", "gymnasium"))
    trained = ", ".join(
        f"{task.steps:,} steps of {task.env}" for task in TASKS.values() if any(f.env == task.env for f in figures)
    )
    shown = [f"![mean return over the number of simulations]({picture})", ""] if picture else []
    return [
        f"`{command}` on {facts['date'][:10]}, Python {facts['python']}, {versions}. {machine}",
        f"{how} PPO was trained for {trained}, with its preset. Medians, and ranges over the seeds in brackets; the "
        "interval is plus or minus, for the mean of one seed. The time per decision is measured with 16 episodes "
        "acting in a batch.",
        "",
        *tables(figures),
        "",
        *shown,
        *(f"- {verdict}" for verdict in verdicts(figures)),
    ]


def save_curves(figures: Sequence[PlanningFigure], path: Path, title: str) -> None:
    """Write a PNG with a panel per task: mean return over simulations; ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    tasks = list(dict.fromkeys(figure.env for figure in figures))
    picture = Picture(figsize=(6.5 * len(tasks), 5.4), layout="constrained")
    FigureCanvasAgg(picture)
    for axes, env in zip(picture.subplots(1, len(tasks), squeeze=False).flat, tasks, strict=True):
        _draw(axes, [figure for figure in figures if figure.env == env], env)
    picture.suptitle(title, fontsize=11)
    picture.savefig(path, dpi=120)


def _draw(axes: Any, figures: Sequence[PlanningFigure], env: str) -> None:
    from matplotlib.ticker import ScalarFormatter

    curve = [figure for figure in figures if figure.name.startswith("search,") and figure.name.endswith("simulations")]
    sims, spreads = [figure.sims for figure in curve], [figure.spread("mean") for figure in curve]
    axes.plot(sims, [s.median for s in spreads], "o-", color=_OURS, linewidth=2, label="half-trained PPO with search")
    axes.fill_between(sims, [s.low for s in spreads], [s.high for s in spreads], color=_OURS, alpha=0.18, linewidth=0)
    colours = iter(_COLOURS * len(figures))
    for figure in figures:
        if figure in curve:
            continue
        spread = figure.spread("mean")
        alone = figure.name == POLICY
        label = "half-trained PPO alone" if alone else figure.name
        colour = "#333333" if alone else next(colours)
        axes.axhline(spread.median, color=colour, linestyle="--" if alone else ":", linewidth=1.6, label=label)
        if alone:
            axes.axhspan(spread.low, spread.high, color=colour, alpha=0.08, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sims)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("simulations per decision", fontsize=9)
    axes.set_title(f"{env}: mean return, median and range over seeds", loc="left", fontsize=10)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize=8)


def _row(figure: PlanningFigure) -> tuple[str, ...]:
    return (
        figure.env,
        figure.name,
        _text(figure.spread("mean"), 1),
        f"{figure.spread('half_width').median:.1f}",
        _text(figure.spread("decision_s"), 3, 1e3),
        f"{figure.spread('simulator_steps').median:,.1f}" if figure.sims else "-",
    )


def _text(spread: Spread, digits: int, times: float = 1.0) -> str:
    median, low, high = (f"{times * value:.{digits}f}" for value in (spread.median, spread.low, spread.high))
    return f"{median} ({low} to {high})"
