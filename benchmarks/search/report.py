"""Results of `python -m benchmarks search`, as tables in BENCHMARKS.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.report import CaseReport
from benchmarks.search.cases import SearchCase
from benchmarks.search.check import Checks
from benchmarks.search.remote import LEAVES, SIMS, TREES, Cost, RemoteFigure

MARKS = ("<!-- search table: written by `python -m benchmarks search` -->", "<!-- end of the search table -->")
_HEAD = ("contestant", "sims/s", "range", "x mctx at its best", "decision p50, ms", "p95, ms", "network calls",
         "rows each", "steps")  # fmt: skip


def tables(reports: Sequence[CaseReport]) -> list[str]:
    """A table per case, the fastest first, with the skipped contestants, and where the time of a simulation goes."""
    lines: list[str] = []
    for report in reports:
        case = report.case
        assert isinstance(case, SearchCase)
        lines += ["", f"{case.label}:", ""]
        lines += table(_HEAD, [_row(report, case, name) for name, _ in report.ranking()])
        lines += ["", *(f"Skipped: {name}, {why}." for name, why in report.outcome.skipped.items())]
        if report.layers:
            rows = [
                (row.name, *(f"{row.layers[c].median:.2f}" for c in report.scale.columns), f"{row.total.median:.2f}")
                for row in report.layers
            ]
            lines += ["", *table(("microseconds of a simulation", *report.scale.columns, "total"), rows)]
    return lines[1:]


def remote_table(figures: Sequence[RemoteFigure], cost: Cost) -> list[str]:
    """The cost of a search whose states are in a C++ simulator."""
    rows = [
        (f.name, f"{f.rate.median:,.0f} {f.unit}", f"{f.rate.low:,.0f} - {f.rate.high:,.0f}", f"{f.times.median:.1f}")
        for f in figures
    ]
    title = f"States in a C++ simulator over tcp, {TREES} x {LEAVES}, {SIMS} simulations, no network:"
    wire = f"A row of EXPAND takes {cost.row_us:.2f} us, {cost.simulator_us:.2f} of them in the simulator."
    return [title, "", *table(("over the link", "rate", "range", "times slower than the first"), rows), "", wire]


def notes(checks: Checks, facts: dict[str, Any], reports: Sequence[CaseReport]) -> list[str]:
    """Descriptions of the columns, and results of the checks."""
    others = max((report.others or 0.0 for report in reports), default=0.0)
    return [
        "Contestants are named by their number of trees; Corral also by the number of simulations in flight per tree. "
        "*Network calls* and simulator *steps* are per decision for all trees; *p50* and *p95* are percentiles of its "
        "time. Corral and LightZero use one core, mctx uses all.",
        "",
        *_checked(checks),
        "",
        *table(("engine", "version", "peak memory, MB", "bytes of a node"), _facts(facts)),
        "",
        f"Other programs used up to {100 * others:.0f} % of the CPU meanwhile.",
    ]


def headline(command: str, facts: dict[str, Any], machine: str) -> str:
    """The command, date and machine of the measurement."""
    versions = ", ".join(f"{name} {facts['versions'][name]}" for name in ("corral-rl", "numpy"))
    return f"`{command}` on {facts['date'][:10]}, Python {facts['python']}, {versions}. {machine}"


def _checked(checks: Checks) -> list[str]:
    lines = [
        f"Checked before: Corral's counts equal those of a plain PUCT in {100 * checks.plain:.1f} % of 256 positions."
    ]
    for name, right in checks.perft.items():
        same = (
            f", {100 * checks.moves[name]:.1f} % of Corral's moves" if name in checks.moves and name != "corral" else ""
        )
        rules = "the rules" if right else "OTHER rules"
        lines.append(f"{name}: {rules} (perft 7), outputs within {checks.outputs[name]:.0e}{same}.")
    return [" ".join(lines)]


def _facts(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            known["version"],
            f"{known['peak_rss'] / 1e6:.0f}",
            f"{known['node_bytes']:.0f}" if known["node_bytes"] else "-",
        )
        for name, known in facts.items()
    ]


def _row(report: CaseReport, case: SearchCase, name: str) -> tuple[str, ...]:
    outcome, of = report.outcome, case.searching[name]
    rate, ratio = outcome.spread(name), outcome.ratio(name, report.base)
    work, count = of.work, max(of.decisions, 1)
    calls, rows, steps = work["network_calls"], work["network_rows"], work["steps"]
    return (
        name, f"{rate.median:,.0f}", f"{rate.low:,.0f} - {rate.high:,.0f}",
        f"{ratio.median:.2f}" if outcome.ratios(name, report.base) else "-",
        f"{1e3 * of.percentile(0.5):.2f}", f"{1e3 * of.percentile(0.95):.2f}",
        f"{calls / count:.0f}" if calls else "-", f"{(rows or 0) / calls:.1f}" if calls else "-",
        f"{steps / count:,.0f}" if steps else "-",
    )  # fmt: skip
