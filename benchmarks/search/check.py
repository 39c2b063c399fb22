"""Correctness before speed: equal rules, equal network outputs, the visit counts of a plain search, and equal moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.search.board import boards_of
from benchmarks.search.plain import PlainSearch
from benchmarks.search.process import EngineProcess
from benchmarks.search.task import PERFT, Array, Problem, SearchTask

_TREES = 64
_SAME_OUTPUTS, _SAME_COUNTS, _SAME_MOVES = 1e-5, 1.0, 0.95


@dataclass
class Checks:
    """Results of the checks by engine."""

    perft: dict[str, bool] = field(default_factory=dict)
    outputs: dict[str, float] = field(default_factory=dict)
    """Largest difference from the outputs of the network in NumPy."""
    moves: dict[str, float] = field(default_factory=dict)
    """Fraction of positions in which an engine selects Corral's move."""
    plain: float = float("nan")
    """Fraction of positions in which Corral's visit counts equal those of the plain search."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def failures(self) -> list[str]:
        """Failed checks, which make speed figures meaningless."""
        found = [f"{name} has other rules of Connect Four" for name, right in self.perft.items() if not right]
        found += [
            f"{name}'s network differs by {gap:.1e}" for name, gap in self.outputs.items() if not gap <= _SAME_OUTPUTS
        ]
        if not self.plain >= _SAME_COUNTS:
            found.append(f"Corral's counts equal those of a plain search in only {100 * self.plain:.1f} % of positions")
        if self.moves.get("mctx", 1.0) < _SAME_MOVES:
            found.append(f"mctx selects the same move in only {100 * self.moves['mctx']:.1f} % of positions")
        return found


def check(
    problem: Problem, engine: Callable[[str], EngineProcess], names: list[str], sims: int, say: Callable[[str], None]
) -> Checks:
    """Check every engine; those that are not installed are skipped."""
    checks, moves = Checks(), dict[str, Any]()
    planes = np.asarray(problem.outputs(_planes(problem)), np.float64)
    for name in names:
        say(f"checking {name}")
        try:
            checks.perft[name] = tuple(engine(name).ask("perft", depth=len(PERFT))) == PERFT
            checks.outputs[name] = float(abs(np.array(engine(name).ask("outputs")) - planes).max())
            if name != "open_spiel_cpp":
                task = asdict(SearchTask("network", _TREES, 1, sims, bounded=True))
                engine(name).ask("prepare", name="check", task=task)
                moves[name] = np.array(engine(name).ask("moves", name="check"))
        except (ImportError, RuntimeError):
            continue
    checks.moves = {name: float((found == moves["corral"]).mean()) for name, found in moves.items()}
    say("checking against a plain search")
    engine("corral").ask("prepare", name="counts", task=asdict(SearchTask("network", _TREES, 1, sims)))
    counts = np.array(engine("corral").ask("counts", name="counts"))
    plain = np.array([PlainSearch(problem, board).counts(sims) for board in boards_of(problem)])
    checks.plain = float((counts == plain).all(1).mean())
    return checks


def _planes(problem: Problem) -> Array:
    from corral.envs.suites.games.connect4 import CONNECT4

    return CONNECT4.look(boards_of(problem))[0]
