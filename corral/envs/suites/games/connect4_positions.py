"""How well a player plays Connect Four: positions with the value of every move, and the fraction of right moves.

`connect4_positions.npz` has 1,000 of them, with 10 to 30 stones, all different, also when mirrored. They are from games
between weak searches that sometimes move at random; the player to move cannot win at once, and can make a mistake: some
legal move is worth less than another. Positions that exceed the solver's budget are left out. `python -m
corral.envs.suites.games.connect4_positions FILE` makes the file in some minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np

from corral.core.types import Array
from corral.envs.suites.games.connect4 import COLUMNS, CONNECT4, ROWS
from corral.envs.suites.games.connect4_solver import ILLEGAL, UNKNOWN, Connect4Solver
from corral.envs.suites.games.players import Player, Random
from corral.envs.suites.games.rollout_mcts import RolloutMcts

_FILE = "connect4_positions.npz"
_COUNT, _PLIES, _SEED = 1000, range(10, 31), 2024
_SIMS, _AT_RANDOM = 50, 0.3
_BUDGET = 50_000_000


@lru_cache(maxsize=1)
def known_positions() -> tuple[Array, Array]:
    """Positions [n, 2], and the value of each move under perfect play for its player: 1, 0, -1, or ILLEGAL [n, 7]."""
    with resources.files(__package__).joinpath(_FILE).open("rb") as file, np.load(file) as stored:
        return stored["positions"], stored["values"].astype(np.int64)


def accuracy(player: Player, seed: int = 0) -> float:
    """The fraction of known positions where the player's move keeps the value."""
    positions, values = known_positions()
    moves = player(positions.copy(), np.random.default_rng(seed))
    return float(np.mean(values[np.arange(len(values)), moves] == values.max(1)))


def generate(count: int, seed: int, plies: Sequence[int] = _PLIES, budget: int = _BUDGET) -> tuple[Array, Array]:
    """Generate `count` positions and the values of their moves, equally many of each number of stones."""
    rng, solver = np.random.default_rng(seed), Connect4Solver(22)
    seen: set[bytes] = set()
    positions, values = [], []
    for stones in np.resize(np.array(plies), count).tolist():
        for position in _candidates(stones, rng):
            if {position.tobytes(), _mirrored(position).tobytes()} & seen:
                continue
            seen.add(position.tobytes())
            found = solver.values(position[None], budget)[0]
            legal = found != ILLEGAL
            if not (found == UNKNOWN).any() and found[legal].min() < found[legal].max():
                positions.append(position)
                values.append(found)
                break
    return np.array(positions), np.array(values)


def _candidates(stones: int, rng: np.random.Generator) -> Iterator[Array]:
    """Positions with this many stones that are not won, and that the player to move cannot win at once."""
    search, chance = RolloutMcts(CONNECT4, _SIMS, explore=1.0), Random(CONNECT4)
    while True:
        states, over = CONNECT4.start(1), np.zeros(1, np.bool_)
        for _ in range(stones):
            player = chance if rng.random() < _AT_RANDOM else search
            _, over = CONNECT4.move(states, player(states, rng))
            if over[0]:
                break
        if not over[0] and not _wins_at_once(states[0]):
            yield states[0].copy()


def _wins_at_once(position: Array) -> bool:
    columns = np.flatnonzero(CONNECT4.look(position[None])[1][0])
    reward, _ = CONNECT4.move(np.repeat(position[None], len(columns), axis=0), columns)
    return bool(reward.any())


def _mirrored(position: Array) -> Array:
    height = ROWS + 1
    columns = [position >> height * column & (1 << height) - 1 for column in range(COLUMNS)]
    mirrored: Array = np.sum([bits << height * (COLUMNS - 1 - column) for column, bits in enumerate(columns)], axis=0)
    return mirrored


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else _FILE)
    made, worth = generate(_COUNT, _SEED)
    np.savez_compressed(path, positions=made, values=worth.astype(np.int8))
    print(f"{len(made)} positions in {path}")
