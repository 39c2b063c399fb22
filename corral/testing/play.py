"""Play a VecEnv and keep every row, per environment and in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from corral.core.types import Array, StepBatch, Tree, tree_map
from corral.envs.vec_env import VecEnv


@dataclass
class Row:
    """One environment's part of a StepBatch, with the observation that its action was chosen on."""

    obs: Tree
    action: Tree
    reward: float
    raw_reward: float
    terminated: bool
    truncated: bool
    next_obs: Tree
    following: Tree  # what the policy saw next: next_obs, or the next episode's first observation
    faulty: bool
    game_over: bool

    @property
    def done(self) -> bool:
        """Whether the episode ended here."""
        return self.terminated or self.truncated


def random_actions(vec: VecEnv, seed: int = 0) -> Callable[[StepBatch], Tree]:
    """A policy that draws from the action space."""
    vec.spec.action_space.seed(seed)

    def act(batch: StepBatch) -> Tree:
        layout = vec.spec.action
        rows = [layout.flatten(vec.spec.action_space.sample()) for _ in range(len(batch))]
        return layout.unflatten([np.stack(leaf) for leaf in zip(*rows, strict=True)])

    return act


def play(
    vec: VecEnv,
    rows_each: int,
    *,
    act: Callable[[StepBatch], Tree] | None = None,
    min_ready: int | None = None,
) -> list[list[Row]]:
    """Play until every environment has delivered `rows_each` rows; returns them per environment."""
    act = act or random_actions(vec)
    rows: list[list[Row]] = [[] for _ in range(vec.num_envs)]
    latest: dict[int, Tree] = {}
    chosen: dict[int, Tree] = {}
    batch = vec.recv()
    _remember(latest, batch.env_ids, batch.obs)
    while min(map(len, rows)) < rows_each:
        actions = act(batch)
        _remember(chosen, batch.env_ids, actions)
        vec.send(batch.env_ids, actions)
        batch = vec.recv(min_ready)
        for k, env_id in enumerate(batch.env_ids.tolist()):
            rows[env_id].append(_row(batch, k, latest[env_id], chosen[env_id]))
        _remember(latest, batch.env_ids, batch.obs)
    return [r[:rows_each] for r in rows]


def _row(batch: StepBatch, k: int, obs: Tree, action: Tree) -> Row:
    return Row(
        obs, action, float(batch.reward[k]), float(batch.raw_reward[k]), bool(batch.terminated[k]),
        bool(batch.truncated[k]), _at(batch.next_obs, k), _at(batch.obs, k), bool(batch.faulty[k]),
        bool(batch.game_over[k]),
    )  # fmt: skip


def _at(tree: Tree, k: int) -> Tree:
    return tree_map(lambda leaf: np.array(leaf[k]), tree)


def _remember(store: dict[int, Any], ids: Array, tree: Tree) -> None:
    for k, env_id in enumerate(ids.tolist()):
        store[env_id] = _at(tree, k)
