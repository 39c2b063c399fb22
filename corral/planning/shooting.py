"""The simplest planner: simulate random actions again and again, and begin as the best simulation did."""

from __future__ import annotations

from typing import Any

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array, Tree, tree_map
from corral.envs.vec_env import VecEnv
from corral.planning.action_set import ActionSet, choose_action_set
from corral.planning.of_vec import states_of
from corral.snapshot.states import States


class Shooting:
    """A Policy that looks `horizon` random steps ahead `sims` times, and takes the first action of the best return.

    It is what other planners have to beat: no tree, no network, no memory.
    """

    def __init__(self, sims: int = 50, horizon: int = 20, *, discount: float = 0.99, seed: int = 0):
        if not all(isinstance(given, (int, np.integer)) and given >= 1 for given in (sims, horizon)):
            raise UserError(
                f"Shooting needs at least 1 simulation of 1 step, in whole numbers, got {sims} of {horizon}."
            )
        if not 0 <= discount <= 1:
            raise UserError(f"discount must be between 0 and 1, got {discount}.")
        self._sims, self._horizon, self._discount = sims, horizon, discount
        self._rng = np.random.default_rng(seed)
        self.reward_scale: float | None = 1.0
        self.simulator_steps = 0
        self._parts: tuple[States, ActionSet] | None = None

    def attach(self, vec: VecEnv) -> None:
        """From now on it acts for these environments."""
        self.close()
        states = states_of(vec)
        if states.players > 1:
            states.close()
            raise UserError("Shooting is for one player; for games take corral.Search.")
        self._parts = states, choose_action_set(states.spec.action, 2)

    def close(self) -> None:
        """Forget the environments."""
        if self._parts is not None:
            self._parts[0].close()
            self._parts = None

    def initial_state(self, n: int) -> Tree:
        """Numbers of the environments."""
        return np.arange(n)

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        """Simulate, and begin as the best simulation did."""
        if self._parts is None:
            raise UserError("Shooting looks ahead from the states of environments: hand it to corral.Sampler.")
        states, actions = self._parts
        n, sims, horizon = len(state), self._sims, self._horizon
        roots = states.save(state)
        drawn = actions.random_env_actions(n * sims * horizon, self._rng)
        shaped = tree_map(lambda leaf: leaf.reshape(n * sims, horizon, *leaf.shape[1:]), drawn)
        seeds = self._rng.integers(1, 2**63, n * sims, np.uint64)
        try:
            found = states.rollout(np.repeat(roots, sims), shaped, seeds)
        finally:
            states.drop(roots)
        self.simulator_steps += int(found.length.sum())
        returns = found.reward @ self._discount ** np.arange(horizon)
        if found.faulty is not None:  # what would have come of them nobody knows
            returns[found.faulty] = -np.inf
        best = returns.reshape(n, sims).argmax(1) + sims * np.arange(n)
        return tree_map(lambda leaf: leaf[best, 0], shaped), state, {}
