"""Steps of planners that fail: each ends its own branch, and only a planner whose steps all fail ends the run.

So it is where environments act, too: a failure costs an episode there, and here what a search would have found beyond.
"""

from __future__ import annotations

import logging

from corral.core.errors import EnvFailed
from corral.core.types import Array

log = logging.getLogger("corral.planning")

_MOST_IN_A_ROW = 1000


class Mishaps:
    """Counts failed steps, says the first, the tenth, the hundredth, ..., and gives up when there is nothing else."""

    def __init__(self, name: str):
        self._name, self.count, self._in_a_row = name, 0, 0

    def note(self, failed: Array, words: str) -> Array | None:
        """Take in which rows of a call failed, and what was said of one; returns `failed`, or None if none did."""
        number = int(failed.sum())
        if not number:
            self._in_a_row = 0
            return None
        before, self.count = self.count, self.count + number
        self._in_a_row = self._in_a_row + number if number == len(failed) else 0
        if self._in_a_row >= _MOST_IN_A_ROW:
            raise EnvFailed(
                f"{self._in_a_row:,} steps of a planner's {self._name} have failed in a row; run `corral check-env` on "
                f"it. Last: {words}"
            )
        if len(str(before)) < len(str(self.count)) or not before:
            log.warning(
                "A planner's %s has failed in %d step%s, each the end of its branch; the search goes on. Last: %s",
                self._name, self.count, "s" * (self.count > 1), words,
            )  # fmt: skip
        return failed
