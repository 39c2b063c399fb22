"""Seconds per update over a slow link, as a table and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.rounds import Spread
from benchmarks.exchange.cases import Cell


def table(cells: Sequence[Cell]) -> list[str]:
    """Markdown: a row per case and a column per rate, with median, range, and speed-up over uncompressed gradients."""
    rates = list(dict.fromkeys(cell.mbit for cell in cells))
    by = {(cell.case, cell.mbit): cell for cell in cells}
    names = list(dict.fromkeys(cell.case for cell in cells))
    lines = [
        "| exchange | bytes per update | " + " | ".join(rate_name(rate) for rate in rates) + " |",
        "|---|---|" + "---|" * len(rates),
    ]
    for name in names:
        row = [by[name, rate] for rate in rates]
        shown = [f"{_time(cell.seconds)}, {_gain(by, cell)}" for cell in row]
        lines.append(f"| {name} | {row[0].bytes_per_update:,.0f} | " + " | ".join(shown) + " |")
    return lines


def save_chart(cells: Sequence[Cell], title: str, path: Path) -> None:
    """Bars of every case, a panel per rate; ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(cell.mbit for cell in cells))
    figure = Figure(figsize=(4.6 * len(rates) + 2, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    colours = {"all_reduce": "#d1495b", "param_server": "#30638e", "gossip": "#4f8a5b"}
    for axes, rate in zip(panels, rates, strict=True):
        row = [cell for cell in cells if cell.mbit == rate]
        medians = [cell.seconds.median for cell in row]
        reach = [
            [cell.seconds.median - cell.seconds.low for cell in row],
            [cell.seconds.high - cell.seconds.median for cell in row],
        ]
        places = range(len(row))
        axes.barh(places, medians, color=[colours[cell.case.split(",")[0].split()[0]] for cell in row], height=0.7)
        axes.errorbar(medians, places, xerr=reach, fmt="none", ecolor="#333333", elinewidth=1.2, capsize=3)
        for place, cell in enumerate(row):
            axes.annotate(
                _seconds(cell.seconds.median), (cell.seconds.high, place), (5, 0), textcoords="offset points",
                va="center", fontsize=8,
            )  # fmt: skip
        axes.set_yticks(places, [cell.case for cell in row], fontsize=9)
        axes.set_xscale("log")
        axes.set_xlim(min(medians) / 2, max(cell.seconds.high for cell in row) * 4)
        axes.set_title(rate_name(rate), loc="left", fontsize=10)
        axes.set_xlabel("seconds per update (log scale)", fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def rate_name(mbit: float) -> str:
    """A link as text."""
    return f"{mbit:g} Mbit/s" if mbit else "not throttled"


def _gain(by: dict[tuple[str, float], Cell], cell: Cell) -> str:
    """How many times faster than the same exchange with whole numbers, or than all_reduce."""
    plain = cell.case.split(",")[0].split()[0]
    base = by[plain if cell.case != plain else "all_reduce", cell.mbit]
    return f"{base.seconds.median / cell.seconds.median:.2f}x"


def _time(spread: Spread) -> str:
    return f"{_seconds(spread.median)} ({_seconds(spread.low)}-{_seconds(spread.high)})"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"
