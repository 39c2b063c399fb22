"""`corral list algos`: the algorithms, what they can act on, and where they are verified."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ListAlgos:
    """List the algorithms: what they do, the action spaces they can do, and the environments they are verified on."""

    def run(self) -> int:
        """Print the list."""
        from corral.algos.registry import ALGORITHMS
        from corral.cli.table import print_table
        from corral.config import presets

        print_table(
            ("algorithm", "what it does", "action spaces", "verified on"),
            (
                (name, entry.summary, entry.actions, ", ".join(presets.verified(name)) or "-")
                for name, entry in ALGORITHMS.items()
            ),
        )
        return 0
