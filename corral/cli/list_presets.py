"""`corral list presets`: which settings come with an algorithm on an environment, and whether they are verified."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ListPresets:
    """List the presets: settings that `corral train` takes for an algorithm on an environment, unless told otherwise.

    A verified one has been trained with several seeds: its note says the score, the steps and the time.
    """

    def run(self) -> int:
        """Print the list."""
        from corral.cli.table import print_table
        from corral.config.presets import PRESETS

        print_table(
            ("algorithm", "environment", "status", "note"),
            ((algo, env, preset.status, preset.note) for (algo, env), preset in PRESETS.items()),
        )
        return 0
