"""`python -m benchmarks exchange`: seconds per update of every exchange and compression over slow links."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from benchmarks.common.command import progress, require_at_least_one, require_folder
from benchmarks.common.facts import facts
from benchmarks.exchange.cases import measure
from benchmarks.exchange.report import save_chart, table
from corral.core.errors import UserError


@dataclass(frozen=True)
class BenchExchange:
    """Measure seconds per update of every exchange and compression between two learners over slow links.

    The link connects two network namespaces, which requires root. Prints a table, and writes exchange.png and
    exchange.json.
    """

    network: Literal["atari", "cartpole"] = "atari"
    """Network whose gradients are exchanged: atari has 1.7 million weights, cartpole 9,000."""
    rates: tuple[float, ...] = (10.0, 100.0, 0.0)
    """Link rates in megabits per second; 0: not throttled."""
    rounds: int = 5
    """Measured updates per exchange and rate."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""

    def run(self) -> int:
        require_at_least_one(rounds=self.rounds)
        if not self.rates or min(self.rates) < 0:
            raise UserError("--rates must be numbers of megabits per second, such as 10 100 0.")
        require_folder(self.out)
        with progress() as say:
            weights, cells = measure(self.network, self.rates, self.rounds, say)
        known = facts()
        title = (
            f"python -m benchmarks exchange, {weights:,} weights, 2 learners, {self.rounds} rounds, "
            f"{known['cores']} cores of {known['cpu']}, {known['date'][:10]}"
        )
        print("\n".join([title, "", *table(cells)]))
        path = self.out / "exchange.json"
        path.write_text(json.dumps({"facts": known, "weights": weights, "cells": [asdict(c) for c in cells]}, indent=1))
        try:
            save_chart(cells, title, self.out / "exchange.png")
            print(f"Wrote {path} and {self.out / 'exchange.png'}.")
        except ImportError:
            print(f"Wrote {path}. No PNG: matplotlib is missing, pip install 'corral-rl[plot]'.")
        return 0
