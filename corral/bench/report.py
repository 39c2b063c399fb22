"""What a benchmark says: tables for the terminal, and the same with every number as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from corral.bench.cases import SYNC, Case
from corral.bench.layers import COLUMNS, Row
from corral.bench.rounds import Outcome, Spread
from corral.bench.targets import Verdict


@dataclass(frozen=True)
class CaseReport:
    """One case, measured."""

    case: Case
    outcome: Outcome
    layers: Sequence[Row]
    verdicts: Sequence[Verdict]
    others: float | None = None  # share of the CPU that other programs used meanwhile

    def ranking(self) -> list[tuple[str, str]]:
        """Names and kinds of those who belong in the table, the fastest first."""
        shown = [e for e in self.case.entries if e.name in self.outcome.rates and e.kind != "layer"]
        shown.sort(key=lambda entry: -self.outcome.spread(entry.name).median)
        return [(entry.name, entry.kind) for entry in shown]


@dataclass
class Report:
    """A whole run."""

    settings: dict[str, Any]
    facts: dict[str, Any]
    cases: list[CaseReport] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        return {
            "settings": self.settings,
            "facts": self.facts,
            "cases": [_case_json(case) for case in self.cases],
        }


def print_case(console: Console, report: CaseReport) -> None:
    """Print the table of one case, what was left out, and its layers."""
    case, outcome = report.case, report.outcome
    console.print(f"\n{case.label}, steps per second\n", style="bold")
    table = _table(console)
    table.add_column("contestant")
    for title in ("median", "range", "x Sync", "range"):
        table.add_column(title, justify="right")
    if case.ideal:
        table.add_column("% of ideal", justify="right")
    for name, kind in report.ranking():
        rate, ratio = outcome.spread(name), outcome.ratio(name, SYNC)
        cells = [name, f"{rate.median:,.0f}", f"{rate.low:,.0f} - {rate.high:,.0f}"]
        cells += (
            [f"{ratio.median:.2f}", f"{ratio.low:.2f} - {ratio.high:.2f}"] if outcome.ratios(name, SYNC) else ["", ""]
        )
        if case.ideal:
            cells.append(f"{100 * rate.median / case.ideal:.1f}")
        table.add_row(*cells, style={"corral": "bold", "bound": "dim"}.get(kind, ""))
    _print(console, table)
    for name, why in outcome.skipped.items():
        console.print(f"skipped {name}: {why}")
    if report.others is not None:
        console.print(f"Other programs used {100 * report.others:.0f} % of the CPU meanwhile.")
    if report.layers:
        console.print(f"\n{case.label}, microseconds per step and layer (medians)\n", style="bold")
        _print(console, _layer_table(console, report.layers))


def print_verdicts(console: Console, reports: Sequence[CaseReport]) -> None:
    """Print each target, the figure, and what bounds it."""
    verdicts = [verdict for report in reports for verdict in report.verdicts]
    console.print("\nTargets\n", style="bold")
    if not verdicts:
        console.print("No target is stated for these cases at these sizes.")
    for verdict in verdicts:
        console.print(f"- {verdict}", style="green" if verdict.reached else "yellow")


def _layer_table(console: Console, rows: Sequence[Row]) -> Table:
    table = _table(console)
    table.add_column("backend")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("total", justify="right")
    for row in rows:
        cells = [f"{row.layers[c].median:.1f}" if c in row.layers else "" for c in COLUMNS]
        table.add_row(row.name, *cells, f"{row.total.median:.1f}")
    return table


def _table(console: Console) -> Table:
    """On a terminal with a line, anywhere else as Markdown."""
    return Table(box=box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN)


def _print(console: Console, table: Table) -> None:
    """Print without the empty lines above and below."""
    with console.capture() as capture:
        console.print(table)
    console.out("\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip()), highlight=False)


def _case_json(report: CaseReport) -> dict[str, Any]:
    case, outcome = report.case, report.outcome
    return {
        "case": case.name,
        "num_envs": case.num_envs,
        "ideal": case.ideal,
        "cpu_share_of_others": report.others,
        "contestants": [
            {
                "name": entry.name,
                "kind": entry.kind,
                "rates": list(outcome.rates[entry.name]),
                "rate": asdict(outcome.spread(entry.name)),
                "ratios_to_sync": outcome.ratios(entry.name, SYNC),
                "ratio_to_sync": _spread_json(outcome.ratio(entry.name, SYNC)),
            }
            for entry in case.entries
            if entry.name in outcome.rates
        ],
        "skipped": dict(outcome.skipped),
        "layers_us": [
            {"backend": row.name, "total": asdict(row.total), **{k: asdict(v) for k, v in row.layers.items()}}
            for row in report.layers
        ],
        "verdicts": [{**asdict(verdict), "reached": verdict.reached} for verdict in report.verdicts],
    }


def _spread_json(spread: Spread) -> dict[str, float] | None:
    """None in place of NaN, which JSON does not have."""
    return None if spread.median != spread.median else asdict(spread)
