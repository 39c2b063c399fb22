"""How many of Connect Four's solved positions a run's agent plays right."""

from __future__ import annotations

import numpy as np

from corral.core.errors import UserError
from corral.runs.load import LoadedPolicy

_GAME = "corral/Connect4-v0"


def share_solved(loaded: LoadedPolicy, sims: int | None = None) -> tuple[float, int]:
    """The share of right moves, and among how many; with so many simulations, by default those of its evaluations."""
    from corral.envs.suites.games.connect4 import CONNECT4
    from corral.envs.suites.games.connect4_positions import accuracy, known_positions
    from corral.planning.evaluator import make_evaluation
    from corral.planning.search_player import SearchPlayer
    from corral.planning.search_policy import Search

    if loaded.experiment.env != _GAME:
        raise UserError(f"Solved positions are of {_GAME}, and this run is of {loaded.experiment.env}.")
    policy = loaded.as_policy() if sims is None else loaded.search_policy(sims)
    if not isinstance(policy, Search):
        raise UserError("Solved positions are played by search: say with how many simulations, --search-sims 100.")
    player = SearchPlayer(
        CONNECT4,
        lambda states, actions: make_evaluation(loaded, states, actions, 1, 1.0, np.random.default_rng(0)),
        policy.sims,
        policy.config,
    )
    return accuracy(player), len(known_positions()[0])
