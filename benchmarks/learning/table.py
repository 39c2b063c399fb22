"""Results of the learning claims, as a table in BENCHMARKS.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table as aligned
from benchmarks.common.markdown import write_between
from benchmarks.common.rounds import Spread
from benchmarks.learning.trials import Finding

MARKS = {
    "learning": (
        "<!-- learning table: written by `python -m benchmarks learning` -->",
        "<!-- end of the learning table -->",
    ),
    "sharing": (
        "<!-- sharing table: written by `python -m benchmarks learning --table sharing` -->",
        "<!-- end of the sharing table -->",
    ),
    "simulators": (
        "<!-- simulators table: written by `python -m benchmarks learning --table simulators` -->",
        "<!-- end of the simulators table -->",
    ),
    "planning": (
        "<!-- planning claims: written by `python -m benchmarks learning --table planning` -->",
        "<!-- end of the planning claims -->",
    ),
    "precision": (
        "<!-- precision table: written by `python -m benchmarks learning --table precision` -->",
        "<!-- end of the precision table -->",
    ),
}
"""Table -> lines before and after it in BENCHMARKS.md."""
_MEASURES = {"train100": "mean of 100 training episodes", "eval": "evaluation"}
_HEAD = ("task", "algorithm", "bar", "within", "seeds", "reached after, steps", "seconds", "at the end", "run, s",
         "simulator steps", "games won", "bytes per update", "encoder in")  # fmt: skip
_ALWAYS = 9  # columns that are always shown; the others only if a claim has a value for them


def table(findings: Sequence[Finding]) -> list[str]:
    """Lines of Markdown, one row per claim: medians and ranges over the seeds that reached the bar."""
    rows = [_row(finding) for finding in findings]
    shown = [k for k in range(len(_HEAD)) if k < _ALWAYS or any(row[k] != "-" for row in rows)]
    return aligned([_HEAD[k] for k in shown], [[row[k] for k in shown] for row in rows])


def rivalries(findings: Sequence[Finding]) -> list[str]:
    """A line for each claim with a rival: the ratio of the environment steps that they need to reach the bar."""
    lines = []
    for finding in findings:
        claim = finding.claim
        wanted = claim.rival, claim.env, claim.measure
        rivals = [f for f in findings if (f.claim.label or f.claim.algo, f.claim.env, f.claim.measure) == wanted]
        if not rivals:
            continue
        theirs = {trial.seed: trial.steps for trial in rivals[0].trials}
        ratios = [t.steps / base for t in finding.trials if t.steps and (base := theirs.get(t.seed))]
        figure = f"{_spread(ratios, '.2f')} times" if ratios else "no known number of"
        bar = f"{claim.bar:g}, {_MEASURES[claim.measure]}"
        lines.append(f"- {claim.name}: {figure} the environment steps of {claim.rival} to {bar}, seed by seed.")
    return lines


def section(findings: Sequence[Finding], facts: dict[str, Any], command: str, jobs: int) -> list[str]:
    """The table with the conditions under which it was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    beside = "one run at a time" if jobs == 1 else f"{jobs} runs side by side"
    return [
        f"`{command}` on {facts['date'][:10]}: {facts['cores']} cores of {facts['cpu']}, Python {facts['python']}, "
        f"{versions}; {beside}. Medians, and ranges over the seeds in brackets.",
        "",
        *table(findings),
        *(["", *compared] if (compared := rivalries(findings)) else []),
    ]


def write_section(path: Path, lines: Sequence[str], name: str = "learning") -> None:
    """Replace the lines between the markers of a file, which is created if it does not exist."""
    if not path.exists():
        path.write_text("\n".join(["# Benchmarks", "", f"## {name.capitalize()}", *MARKS[name], ""]))
    write_between(path, MARKS[name], lines)


def _row(finding: Finding) -> tuple[str, ...]:
    claim, trials = finding.claim, finding.trials
    done = [trial for trial in trials if trial.steps is not None]
    return (
        claim.env.rpartition(":")[2],
        claim.label or claim.algo,
        f"{claim.bar:g}, {_MEASURES[claim.measure]}",
        f"{claim.steps:,}" + ("" if claim.within_s == math.inf else f", {claim.within_s / 60:g} min"),
        f"{len(done)} of {len(trials)}",
        _spread([trial.steps for trial in done if trial.steps is not None], ",.0f"),
        _spread([trial.seconds for trial in done if trial.seconds is not None], ".1f"),
        _spread([trial.final for trial in trials], ".2f" if abs(claim.bar) < 10 else ".1f"),
        _spread([trial.total_s for trial in trials], ".1f"),
        _spread([trial.simulator_steps for trial in done if trial.simulator_steps is not None], ",.0f"),
        _spread([trial.won for trial in trials if trial.won is not None], ".1%"),
        _bytes([trial.bytes_per_update for trial in trials if trial.bytes_per_update is not None]),
        ", ".join(dict.fromkeys(trial.precision for trial in trials if trial.precision)) or "-",
    )


def _bytes(values: Sequence[float]) -> str:
    return f"{Spread.of(values).median:,.0f}" if values else "-"


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    spread = Spread.of(values)
    return f"{spread.median:{form}} ({spread.low:{form}} to {spread.high:{form}})"
