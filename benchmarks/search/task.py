"""The task of every engine of `python -m benchmarks search`: the same positions of Connect Four and the same network.

A file contains both, so that engines in other processes and other Pythons need nothing else. Positions are given by
the columns played; the network is 84-128-128-(7+1) with ReLU, on planes of own and other stones, bottom row first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
Evaluator = Literal["network", "zero", "rollouts"]

ROOTS, COLUMNS, PLANES = 256, 7, 84
C_INIT, C_BASE = 1.25, 19652.0
PERFT = (7, 49, 343, 2401, 16807, 117649, 823536)
"""Number of legal move sequences by length, starting at 1."""
_LONGEST_PREFIX, _HIDDEN = 20, 128


@dataclass(frozen=True)
class SearchTask:
    """Search `trees` positions at once, with up to `leaves` simulations of each in flight."""

    evaluator: Evaluator
    trees: int
    leaves: int = 1
    sims: int = 100
    bounded: bool = False
    """Scale values by the bounds -1 and 1, as mctx does, instead of the lowest and highest return of the tree."""


@dataclass(frozen=True)
class Problem:
    """Positions as columns played, and layers as (weight [inputs, outputs], bias)."""

    prefixes: Sequence[Sequence[int]]
    layers: Sequence[tuple[Array, Array]]

    def outputs(self, planes: Array) -> Array:
        """The network in NumPy, for rows of planes: seven logits and a value."""
        x = planes.reshape(len(planes), PLANES)
        for weight, bias in self.layers[:-1]:
            x = np.maximum(x @ weight + bias, 0.0)
        weight, bias = self.layers[-1]
        return np.asarray(x @ weight + bias)


def make_problem(seed: int = 0) -> Problem:
    """Unfinished positions after 0 to 20 random moves, and a network with random weights."""
    from corral.envs.suites.games.connect4 import CONNECT4

    rng = np.random.default_rng(seed)
    prefixes: list[list[int]] = []
    while len(prefixes) < ROOTS:
        board, played, over = CONNECT4.start(1), [], np.zeros(1, np.bool_)
        for _ in range(int(rng.integers(_LONGEST_PREFIX + 1))):
            played.append(int(rng.choice(np.flatnonzero(CONNECT4.look(board)[1][0]))))
            _, over = CONNECT4.move(board, np.array(played[-1:]))
            if over[0]:
                break
        if not over[0]:
            prefixes.append(played)
    sizes = (PLANES, _HIDDEN, _HIDDEN, COLUMNS + 1)
    layers = [
        (
            (rng.standard_normal((inputs, outputs)) * np.sqrt(scale / inputs)).astype(np.float32),
            (0.1 * rng.standard_normal(outputs)).astype(np.float32),
        )
        for inputs, outputs, scale in zip(sizes[:-1], sizes[1:], (4.0, 2.0, 0.25), strict=True)
    ]
    return Problem(prefixes, layers)


def save_problem(problem: Problem, path: Path) -> None:
    """Write a file that every engine can read."""
    table = np.full((len(problem.prefixes), _LONGEST_PREFIX), -1, np.int64)
    for row, played in zip(table, problem.prefixes, strict=True):
        row[: len(played)] = played
    layers = {
        f"{name}{k}": part for k, layer in enumerate(problem.layers) for name, part in zip("wb", layer, strict=True)
    }
    np.savez(path, allow_pickle=False, prefixes=table, **layers)


def load_problem(path: Path) -> Problem:
    """Read the file of `save_problem`."""
    with np.load(path) as file:
        prefixes = [row[row >= 0].tolist() for row in file["prefixes"]]
        layers = [(file[f"w{k}"], file[f"b{k}"]) for k in range(3)]
    return Problem(prefixes, layers)
