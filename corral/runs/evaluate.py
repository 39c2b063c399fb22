"""Evaluation: whole episodes with seeds of their own, apart from training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from corral.acting.policy import Policy, to_numpy
from corral.envs.contract import VecEnv
from corral.types import Tree, tree_map

_MOST_ENVS = 16


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of whole episodes, in the game's own reward."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Standard deviation of the returns."""
        return float(np.std(self.returns))

    @property
    def half_width(self) -> float:
        """Half of the 95 % confidence interval of the mean."""
        return 1.96 * self.std / len(self.returns) ** 0.5

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        return {"mean": self.mean, "std": self.std, "returns": list(self.returns), "lengths": list(self.lengths)}


def num_eval_envs(episodes: int) -> int:
    """How many environments play that many episodes side by side."""
    return min(episodes, _MOST_ENVS)


def evaluate(vec: VecEnv, policy: Policy, episodes: int, seed: int) -> Evaluation:
    """Let the policy play `episodes` whole games.

    Every environment plays its share of them, and no more: whoever took the first to finish would prefer short
    games. A game cut short by a fault is played again.
    """
    n = vec.num_envs
    quota = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    vec.reset(seed)
    batch = vec.recv()
    state = policy.initial_state(n)
    state = None if state is None else tree_map(np.array, to_numpy(state))
    running, steps = np.zeros(n), np.zeros(n, np.int64)
    returns: list[list[float]] = [[] for _ in range(n)]
    lengths: list[list[int]] = [[] for _ in range(n)]
    while quota.any():
        ids = batch.env_ids
        action, after, _ = policy.act(batch.obs, _rows(state, ids), batch.first)
        if state is not None:
            state = _with_rows(state, ids, to_numpy(after))
        vec.send(ids, action)
        batch = vec.recv()
        running[batch.env_ids] += batch.raw_reward
        steps[batch.env_ids] += 1
        for row in np.flatnonzero(batch.game_over | batch.faulty):
            env_id = batch.env_ids[row]
            if quota[env_id] and not batch.faulty[row]:
                quota[env_id] -= 1
                returns[env_id].append(float(running[env_id]))
                lengths[env_id].append(int(steps[env_id]))
            running[env_id] = steps[env_id] = 0
    return Evaluation(tuple(chain.from_iterable(returns)), tuple(chain.from_iterable(lengths)))


def _rows(state: Tree, ids: Any) -> Tree:
    return None if state is None else tree_map(lambda leaf: leaf[ids], state)


def _with_rows(state: Tree, ids: Any, rows: Tree) -> Tree:
    def put(old: Any, new: Any) -> Any:
        old[ids] = new
        return old

    return tree_map(put, state, rows)
