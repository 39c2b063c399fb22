"""A benchmark as a bar chart with ranges: one panel per case, two side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.report import CaseReport, Report

_COLOURS = {"corral": "#d1495b", "peer": "#8d99ae", "bound": "#e4e6eb"}
_MEANING = {"corral": "Corral", "peer": "other libraries", "bound": "upper bound"}


def save_chart(report: Report, path: Path) -> None:
    """Write a PNG; ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = [case for case in report.cases if case.outcome.rates]
    columns = 1 if len(panels) <= 2 else 2
    bars = [max(len(case.ranking()) for case in panels[k : k + columns]) for k in range(0, len(panels), columns)]
    size = (8.5 * columns, 0.9 + sum(0.30 * count + 0.95 for count in bars))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(bars), columns, squeeze=False, height_ratios=bars).flat
    for axes, case in zip(all_axes, panels, strict=False):
        _draw(axes, case)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    kinds = [kind for kind in _MEANING if any(kind == k for case in panels for _, k in case.ranking())]
    handles = [Patch(facecolor=_COLOURS[kind], label=_MEANING[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), frameon=False)
    figure.suptitle(_title(report), fontsize=11)
    figure.savefig(path, dpi=120)


def _draw(axes: Any, case: CaseReport) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    ranking, outcome = case.ranking(), case.outcome
    spreads = [outcome.spread(name) for name, _ in ranking]
    medians = [spread.median for spread in spreads]
    reach = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    places = range(len(ranking))
    axes.barh(places, medians, color=[_COLOURS[kind] for _, kind in ranking], height=0.7)
    axes.errorbar(medians, places, xerr=reach, fmt="none", ecolor="#333333", elinewidth=1.2, capsize=3)
    axes.set_yticks(places, [name for name, _ in ranking], fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = min(s.low for s in spreads), max(s.high for s in spreads)
    axes.set_xlim(low / 2, high * (high / low) ** 0.25 * 2)  # room for the figures on the right
    for place, (name, _) in enumerate(ranking):
        axes.annotate(
            _label(case, name),
            (spreads[place].high, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    if case.case.ideal:
        axes.axvline(case.case.ideal, color="#333333", linestyle=":", linewidth=1, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="x", which="both", labelsize=8)
    title = f"{case.case.label}: {case.scale.unit} (log scale), median and range"
    axes.set_title(title, loc="left", fontsize=10)


def _label(case: CaseReport, name: str) -> str:
    rate, ratio = case.outcome.spread(name).median, case.outcome.ratio(name, case.base).median
    text = f"{rate:,.0f}"
    if case.case.ideal:
        return f"{text}   {100 * rate / case.case.ideal:.0f} % of ideal"
    return f"{text}   {ratio:.2f} x {case.scale.base_title}" if ratio == ratio else text


def _title(report: Report) -> str:
    facts, settings = report.facts, report.settings
    return (
        f"{report.cases[0].scale.command}, {settings['rounds']} x {settings['seconds']:g} s, "
        f"{facts['cores']} cores of {facts['cpu']}, {facts['date'][:10]}"
    )
