"""`corral bench exchange`: seconds per update of every exchange and compression, over slow links."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from corral.cli import bench_parts as parts
from corral.core.errors import UserError


@dataclass(frozen=True)
class BenchExchange:
    """Measure seconds per update of every exchange and compression between two learners, over slow links.

    The link is made of two network namespaces, which takes root. Prints a table, and writes exchange.png and
    exchange.json.
    """

    network: Literal["atari", "cartpole"] = "atari"
    """Whose gradients: 1.7 million weights, or 9,000."""
    rates: tuple[float, ...] = (10.0, 100.0, 0.0)
    """Megabits per second of the link; 0: as many as the machine can."""
    rounds: int = 5
    """Updates of everybody at every rate."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""

    def run(self) -> int:
        """Measure, print, and write the files."""
        parts.require_at_least_one(rounds=self.rounds)
        if not self.rates or min(self.rates) < 0:
            raise UserError("--rates must be megabits per second, such as 10 100 0.")
        parts.require_folder(self.out)
        from corral.bench.exchange import measure
        from corral.bench.exchange_report import save_chart, table
        from corral.bench.facts import facts

        with parts.progress() as say:
            weights, cells = measure(self.network, self.rates, self.rounds, say)
        known = facts()
        title = (
            f"corral bench exchange, {weights:,} weights, 2 learners, {self.rounds} rounds, {known['cores']} cores of "
            f"{known['cpu']}, {known['date'][:10]}"
        )
        print("\n".join([title, "", *table(cells)]))
        path = self.out / "exchange.json"
        path.write_text(json.dumps({"facts": known, "weights": weights, "cells": [asdict(c) for c in cells]}, indent=1))
        try:
            save_chart(cells, title, self.out / "exchange.png")
            print(f"Wrote {path} and {self.out / 'exchange.png'}.")
        except ImportError:
            print(f"Wrote {path}; for the picture, install matplotlib.")
        return 0
