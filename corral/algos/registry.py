"""The algorithms by name. Listing them imports none."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import Any

from corral.errors import UserError


@dataclass(frozen=True)
class AlgorithmEntry:
    """Where an algorithm is, and what it does."""

    module: str
    class_name: str
    summary: str
    actions: str

    def load(self) -> Any:
        """The algorithm's class."""
        return getattr(importlib.import_module(self.module), self.class_name)

    def config(self) -> Any:
        """The class of its settings."""
        return importlib.import_module(self.module).Config


_ALL = "discrete, multi-discrete, continuous, hybrid"
ALGORITHMS = {
    "reinforce": AlgorithmEntry(
        "corral.algos.reinforce", "Reinforce", "policy gradient over whole episodes", _ALL
    ),
    "a2c": AlgorithmEntry("corral.algos.a2c", "A2c", "advantage actor-critic, one update per short batch", _ALL),
    "ppo": AlgorithmEntry("corral.algos.ppo", "Ppo", "clipped policy updates, several epochs per batch", _ALL),
    "dqn": AlgorithmEntry(
        "corral.algos.dqn", "Dqn", "action values from replay: double, dueling, n-step, prioritised",
        "discrete, multi-discrete with few combinations",
    ),
}  # fmt: skip


def find_algorithm(name: str) -> AlgorithmEntry:
    """The algorithm of that name; UserError with the nearest name when there is none."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    close = difflib.get_close_matches(str(name).lower(), ALGORITHMS, 1, 0.5)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(ALGORITHMS)}."
    raise UserError(f"No algorithm {name!r}; {hint}")
