"""Results of `python -m benchmarks link`, as tables in BENCHMARKS.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.report import CaseReport
from benchmarks.link.cases import BARE, JSON, RLLINK, TCP, ZMQ, LinkCase
from benchmarks.link.sims import Noop

MARKS = ("<!-- link table: written by `python -m benchmarks link` -->", "<!-- end of the link table -->")
_HEAD = ("contestant", "rows/s", "range", "us per row", "overhead, us", f"x {JSON}", "range")


def tables(reports: Sequence[CaseReport]) -> list[str]:
    """A table per case, the fastest first, with the skipped contestants, and where the time of a row goes."""
    lines: list[str] = []
    for report in reports:
        case = report.case
        assert isinstance(case, LinkCase)
        rows = [_row(report, case, name) for name, _ in report.ranking()]
        lines += ["", f"{case.title}:", "", *table(_HEAD, rows)]
        lines += [f"Skipped: {name}, {why}." for name, why in report.outcome.skipped.items()]
        if report.layers:
            columns = ("microseconds of a row", *report.scale.columns, "total")
            parts = [
                (row.name, *(f"{row.layers[c].median:.2f}" for c in report.scale.columns), f"{row.total.median:.2f}")
                for row in report.layers
            ]
            lines += ["", *table(columns, parts)]
    return lines[1:]


def notes(noop: Noop, reports: Sequence[CaseReport]) -> list[str]:
    """Descriptions of the contestants and columns."""
    names = {name for report in reports for name in report.outcome.rates}
    language = noop.language("link", "tcp://"), noop.language("link", "zmq://"), noop.language("json")
    lines = [
        f"Learners are Python, in the main process; simulators are separate processes on loopback that only answer: "
        f"{TCP} {language[0]}, {ZMQ} {language[1]}, {JSON} {language[2]}, the others as named. Corral sends one "
        f"message for all environments; REQ/REP and gRPC send one for each, as users do. *{BARE}* sends the bytes of "
        f"{TCP} over blocking sockets without parsing them. *Overhead* is the time per row without the simulator's own "
        "work time.",
    ]
    if RLLINK in names:
        lines.append(
            "RLlink has no message for a step: its simulator selects the actions and sends episodes, so its rows need "
            "no round trip."
        )
    if noop.why:
        lines.append(f"Note: {noop.why}.")
    others = max((report.others or 0.0 for report in reports), default=0.0)
    lines.append(f"Other programs used up to {100 * others:.0f} % of the CPU meanwhile.")
    return lines


def section(
    reports: Sequence[CaseReport], noop: Noop, facts: dict[str, Any], command: str, machine: str, picture: str | None
) -> list[str]:
    """The tables with the conditions under which they were measured."""
    versions = ", ".join(
        f"{name} {facts['versions'][name]}" for name in ("corral-rl", "numpy") if name in facts["versions"]
    )
    head = f"`{command}` on {facts['date'][:10]}, Python {facts['python']}, {versions}. {machine}"
    shown = ["", f"![rows per second]({picture})"] if picture else []
    verdicts = [f"- {verdict}" for report in reports for verdict in report.verdicts]
    return [head, *notes(noop, reports), "", *tables(reports), *shown, "", *verdicts]


def _row(report: CaseReport, case: LinkCase, name: str) -> tuple[str, ...]:
    rate, ratio, meter = report.outcome.spread(name), report.outcome.ratio(name, JSON), case.meters.get(name)
    known = bool(report.outcome.ratios(name, JSON))
    overhead = f"{meter.overhead_us:.2f}" if meter and meter.work_s else "-"
    return (
        name, f"{rate.median:,.0f}", f"{rate.low:,.0f} - {rate.high:,.0f}", f"{1e6 / rate.median:.2f}", overhead,
        f"{ratio.median:.2f}" if known else "-", f"{ratio.low:.2f} - {ratio.high:.2f}" if known else "-",
    )  # fmt: skip
