"""Where the time of a step goes: microseconds per step and layer, from the rounds of one case.

Each layer is the difference of two contestants within a round, one with it and one without. On `process` all
workers step at once, so its simulator and group columns are wall time shared by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.bench import cases
from corral.bench.rounds import Outcome, Spread

COLUMNS = ("simulator", "group", "send/recv", "IPC", "sampler")
"""Stepping alone; copying, checking and new episodes; bookkeeping of a batch; wake-ups; trajectories."""

# By row and column: with the layer, and without it. The parent's send and recv on `process` count as IPC.
_ROWS: dict[str, dict[str, tuple[str, str | None]]] = {
    "local": {
        "simulator": (cases.BARE_ONE, None),
        "group": (cases.GROUP_ONE, cases.BARE_ONE),
        "send/recv": (cases.LOCAL, cases.GROUP_ONE),
        "sampler": (cases.LOCAL_SAMPLER, cases.LOCAL),
    },
    "process, lockstep": {
        "simulator": (cases.BARE_ALL, None),
        "group": (cases.GROUP_ALL, cases.BARE_ALL),
        "IPC": (cases.LOCKSTEP, cases.GROUP_ALL),
    },
    "process, halves": {
        "simulator": (cases.BARE_ALL, None),
        "group": (cases.GROUP_ALL, cases.BARE_ALL),
        "IPC": (cases.HALVES, cases.GROUP_ALL),
        "sampler": (cases.SAMPLER, cases.HALVES),
    },
}


@dataclass(frozen=True)
class Row:
    """One way of sampling: microseconds per step by layer, and in total."""

    name: str
    layers: dict[str, Spread]
    total: Spread


def layers_of(outcome: Outcome) -> list[Row]:
    """The layer table of a case that has these contestants; empty when one was left out."""
    needed = {name for row in _ROWS.values() for pair in row.values() for name in pair if name}
    if not needed <= set(outcome.rates):
        return []
    micros = {name: [1e6 / rate for rate in outcome.rates[name]] for name in needed}
    return [_row(name, parts, micros) for name, parts in _ROWS.items()]


def _row(
    name: str, parts: dict[str, tuple[str, str | None]], micros: dict[str, Sequence[float]] | dict[str, list[float]]
) -> Row:
    spreads = {}
    for column, (with_it, without) in parts.items():
        base = micros[without] if without else [0.0] * len(micros[with_it])
        spreads[column] = Spread.of(a - b for a, b in zip(micros[with_it], base, strict=True))
    outermost = list(parts.values())[-1][0]
    return Row(name, spreads, Spread.of(micros[outermost]))
