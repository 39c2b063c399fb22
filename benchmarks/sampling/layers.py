"""Where the time of a step goes: microseconds per step and layer, from the rounds of one case.

Each layer is the difference of two contestants within a round, one with it and one without. On `process` all workers
step concurrently, so the simulator and group columns are wall time divided among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.report import LayerRow
from benchmarks.common.rounds import Outcome, Spread
from benchmarks.sampling import names

COLUMNS = ("simulator", "group", "send/recv", "IPC", "sampler")
"""Stepping alone; copying, checks and resets; bookkeeping of a batch; wake-ups; trajectories."""

# By row and column: the contestant with the layer, and the one without. On `process`, send and recv count as IPC.
_ROWS: dict[str, dict[str, tuple[str, str | None]]] = {
    "local": {
        "simulator": (names.BARE_ONE, None),
        "group": (names.GROUP_ONE, names.BARE_ONE),
        "send/recv": (names.LOCAL, names.GROUP_ONE),
        "sampler": (names.LOCAL_SAMPLER, names.LOCAL),
    },
    "process, lockstep": {
        "simulator": (names.BARE_ALL, None),
        "group": (names.GROUP_ALL, names.BARE_ALL),
        "IPC": (names.LOCKSTEP, names.GROUP_ALL),
    },
    "process, halves": {
        "simulator": (names.BARE_ALL, None),
        "group": (names.GROUP_ALL, names.BARE_ALL),
        "IPC": (names.HALVES, names.GROUP_ALL),
        "sampler": (names.SAMPLER, names.HALVES),
    },
}


def layers_of(outcome: Outcome) -> list[LayerRow]:
    """The layer table of a case; empty if one of its contestants was skipped."""
    needed = {name for row in _ROWS.values() for pair in row.values() for name in pair if name}
    if not needed <= set(outcome.rates):
        return []
    micros = {name: [1e6 / rate for rate in outcome.rates[name]] for name in needed}
    return [_row(name, parts, micros) for name, parts in _ROWS.items()]


def _row(
    name: str, parts: dict[str, tuple[str, str | None]], micros: dict[str, Sequence[float]] | dict[str, list[float]]
) -> LayerRow:
    spreads = {}
    for column, (with_it, without) in parts.items():
        base = micros[without] if without else [0.0] * len(micros[with_it])
        spreads[column] = Spread.of(a - b for a, b in zip(micros[with_it], base, strict=True))
    outermost = list(parts.values())[-1][0]
    return LayerRow(name, spreads, Spread.of(micros[outermost]))
