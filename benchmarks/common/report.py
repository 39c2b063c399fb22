"""What a benchmark reports: tables for the terminal, and the same as JSON with every number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common.rounds import Entry, Outcome, Spread


class Comparison(Protocol):
    """What a report needs from a comparison."""

    @property
    def name(self) -> str:
        """Short name."""

    @property
    def label(self) -> str:
        """Title."""

    @property
    def num_envs(self) -> int | None:
        """Number of environments, if it is the same for all contestants."""

    @property
    def entries(self) -> Sequence[Entry]:
        """The contestants."""

    @property
    def ideal(self) -> float | None:
        """Rate that cannot be exceeded, if known."""

    @property
    def scale(self) -> Scale:
        """Units and titles of its figures."""

    def base(self, outcome: Outcome) -> str:
        """The contestant that ratios are relative to."""

    def layers(self, outcome: Outcome) -> Sequence[LayerRow]:
        """Where the time goes; empty if a layer was not measured."""

    def verdicts(self, outcome: Outcome, layers: Sequence[LayerRow]) -> Sequence[Verdict]:
        """Targets, and whether they are met."""


@dataclass(frozen=True)
class Scale:
    """The unit of a benchmark's figures, and the title of what they are compared with."""

    command: str
    unit: str
    base_title: str
    layers: str = ""
    columns: Sequence[str] = ()
    rows: str = ""


@dataclass(frozen=True)
class Verdict:
    """A target and the figure measured for it, ratios unless they have a unit; `bound` is what limits the figure."""

    target: str
    needed: float
    figure: Spread
    contestant: str
    bound: str
    unit: str = ""
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """Whether the median reaches the target."""
        return self.figure.median <= self.needed if self.at_most else self.figure.median >= self.needed

    def __str__(self) -> str:
        low, high = _number(self.figure.low), _number(self.figure.high)
        spread = f"range {low} to {high}; " if low != high else ""
        needed = f"target: at {'most' if self.at_most else 'least'} {self.needed:,g}"
        figure = f"{_number(self.figure.median)}{self.unit and ' '}{self.unit} ({spread}{needed})"
        outcome = "Met" if self.reached else "Not met"
        return f"{self.target}: {figure}. {outcome}. Measured: {self.contestant}. {self.bound}".rstrip()


@dataclass(frozen=True)
class LayerRow:
    """One way of sampling: microseconds per step by layer, and in total."""

    name: str
    layers: dict[str, Spread]
    total: Spread

    @property
    def largest(self) -> str:
        """The layer that takes most of the time."""
        return max(self.layers, key=lambda name: self.layers[name].median)


@dataclass(frozen=True)
class CaseReport:
    """One case, measured."""

    case: Comparison
    outcome: Outcome
    layers: Sequence[LayerRow]
    verdicts: Sequence[Verdict]
    others: float | None  # CPU share of other programs meanwhile
    base: str  # the contestant that ratios are relative to
    scale: Scale

    def ranking(self) -> list[tuple[str, str]]:
        """Names and kinds of the rows of the table, the fastest first."""
        shown = [e for e in self.case.entries if e.name in self.outcome.rates and e.kind != "layer"]
        shown.sort(key=lambda entry: -self.outcome.spread(entry.name).median)
        return [(entry.name, entry.kind) for entry in shown]


@dataclass
class Report:
    """A whole run."""

    settings: dict[str, Any]
    facts: dict[str, Any]
    cases: list[CaseReport] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    """Further results by name, JSON-ready."""

    def to_json(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        return {
            "settings": self.settings,
            "facts": self.facts,
            "cases": [_case_json(case) for case in self.cases],
            **self.more,
        }


def print_case(console: Console, report: CaseReport) -> None:
    """Print the table of one case, the skipped contestants, and the layers."""
    case, outcome = report.case, report.outcome
    base, scale = report.base, report.scale
    console.print(f"\n{case.label}, {scale.unit}\n", style="bold")
    table = _table(console)
    table.add_column("contestant")
    for title in ("median", "range", f"x {scale.base_title}", "range"):
        table.add_column(title, justify="right")
    if case.ideal:
        table.add_column("% of ideal", justify="right")
    for name, kind in report.ranking():
        rate, ratio = outcome.spread(name), outcome.ratio(name, base)
        cells = [name, f"{rate.median:,.0f}", f"{rate.low:,.0f} - {rate.high:,.0f}"]
        cells += (
            [f"{ratio.median:.2f}", f"{ratio.low:.2f} - {ratio.high:.2f}"] if outcome.ratios(name, base) else ["", ""]
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
        console.print(f"\n{case.label}, {scale.layers} (medians)\n", style="bold")
        _print(console, _layer_table(console, report))


def print_verdicts(console: Console, reports: Sequence[CaseReport]) -> None:
    """Print each target, the measured figure, and its bound."""
    verdicts = [verdict for report in reports for verdict in report.verdicts]
    console.print("\nTargets\n", style="bold")
    if not verdicts:
        console.print("No targets for these cases at these sizes.")
    for verdict in verdicts:
        console.print(f"- {verdict}", style="green" if verdict.reached else "yellow")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _layer_table(console: Console, report: CaseReport) -> Table:
    table, columns = _table(console), report.scale.columns
    table.add_column(report.scale.rows)
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("total", justify="right")
    for row in report.layers:
        cells = [f"{row.layers[c].median:.1f}" if c in row.layers else "" for c in columns]
        table.add_row(row.name, *cells, f"{row.total.median:.1f}")
    return table


def _table(console: Console) -> Table:
    """A ruled table on a terminal, Markdown elsewhere."""
    return Table(box=box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN)


def _print(console: Console, table: Table) -> None:
    """Print without the empty lines above and below."""
    with console.capture() as capture:
        console.print(table)
    console.out("\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip()), highlight=False)


def _case_json(report: CaseReport) -> dict[str, Any]:
    case, outcome, base = report.case, report.outcome, report.base
    to_base = f"to_{report.scale.base_title.lower()}"
    return {
        "case": case.name,
        "unit": report.scale.unit,
        "base": base,
        "num_envs": case.num_envs,
        "ideal": case.ideal,
        "cpu_share_of_others": report.others,
        "contestants": [
            {
                "name": entry.name,
                "kind": entry.kind,
                "rates": list(outcome.rates[entry.name]),
                "rate": asdict(outcome.spread(entry.name)),
                f"ratios_{to_base}": outcome.ratios(entry.name, base),
                f"ratio_{to_base}": _spread_json(outcome.ratio(entry.name, base)),
            }
            for entry in case.entries
            if entry.name in outcome.rates
        ],
        "skipped": dict(outcome.skipped),
        "layers": [
            {report.scale.rows: row.name, "total": asdict(row.total), **{k: asdict(v) for k, v in row.layers.items()}}
            for row in report.layers
        ],
        "verdicts": [{**asdict(verdict), "reached": verdict.reached} for verdict in report.verdicts],
    }


def _spread_json(spread: Spread) -> dict[str, float] | None:
    """None in place of NaN, which JSON does not have."""
    return None if spread.median != spread.median else asdict(spread)
