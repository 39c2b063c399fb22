"""A Corral VecEnv behind Gymnasium's vector interface."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from corral.core.errors import UserError
from corral.core.types import Array, StepBatch, Tree

if TYPE_CHECKING:
    from corral.envs.vec_env import VecEnv


INFOS = ("raw_reward", "game_over", "faulty")


class ResetSeeds:
    """Seeds of successive resets, shared by the adapters to Gymnasium and SB3. A given seed is used. Without one, the
    first reset gets `first` (the seed of `make_vec`) and each later one a fresh seed from an RNG seeded with the last
    given seed: runs repeat exactly, and every reset plays new episodes.
    """

    def __init__(self, first: int):
        self._waiting: int | None = first
        self._fresh = np.random.default_rng(first)

    def next(self, seed: Any = None) -> int:
        if seed is not None:
            self.plan(seed)
        planned, self._waiting = self._waiting, None
        return int(self._fresh.integers(2**31)) if planned is None else planned

    def plan(self, seed: Any) -> None:
        try:
            self._waiting = operator.index(seed)
            self._fresh = np.random.default_rng(self._waiting)
        except (TypeError, ValueError):
            raise UserError(
                f"seed must be one non-negative integer, got {seed!r}; Corral derives a different seed "
                "for each environment from it."
            ) from None


class AsGymnasium(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """All environments of a VecEnv, stepped together, with same-step autoreset.

    Where an episode ended, `obs` is the next episode's first observation, and `infos` has the last one in Gymnasium's
    format: `final_obs`, an object array with None in the other rows, and the mask `_final_obs`. A VecEnv does not
    transmit the environments' infos, so `final_info` is empty. Every step's `infos` also has three arrays:

    - `raw_reward`: the unclipped, unscaled reward.
    - `game_over`: the game ended; under `EpisodicLife` a row terminates at each life lost.
    - `faulty`: the step never happened because its environment failed and was restarted. Such a row is truncated, with
      reward 0: keep it out of losses and statistics.

    `reset(seed=7)` reseeds every environment from that one number (a list is refused). Without a seed, the first reset
    uses the seed of `make_vec`, and later ones use fresh seeds.

    Gymnasium's vector wrappers of rewards, actions and statistics work on top. Those of observations refuse same-step
    vector environments, because they do not transform `final_obs`; wrap each environment instead.
    """

    def __init__(self, vec: VecEnv):
        self.vec, self.num_envs = vec, vec.num_envs
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = vec.spec.observation_space
        self.single_action_space = vec.spec.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._seeds = ResetSeeds(vec.seed)
        self._all_ids = np.arange(self.num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tree, dict[str, Any]]:
        if options:
            raise UserError(
                f"reset(options={options!r}) cannot reach environments behind a VecEnv; pass env_kwargs to "
                "corral.make_vec instead."
            )
        chosen = self._seeds.next(seed)
        super().reset(seed=chosen)  # seeds np_random, which wrappers may use
        self.vec.reset(chosen)
        batch = self.vec.recv()
        self._all_ids = batch.env_ids
        return batch.obs, {}

    def step(self, actions: Tree) -> tuple[Tree, Array, Array, Array, dict[str, Any]]:
        self.vec.send(self._all_ids, actions)
        batch = self.vec.recv()
        return batch.obs, batch.reward, batch.terminated, batch.truncated, self._infos(batch)

    def close_extras(self, **kwargs: Any) -> None:
        self.vec.close()

    def _infos(self, batch: StepBatch) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for name in INFOS:
            infos[name] = getattr(batch, name)
            infos[f"_{name}"] = np.ones(self.num_envs, np.bool_)
        if batch.final_obs is not None:
            ended = batch.terminated | batch.truncated
            infos["final_obs"] = self._final_obs(batch.final_obs, ended)
            infos["_final_obs"] = ended
            infos["final_info"] = {}
            infos["_final_info"] = ended.copy()
        return infos

    def _final_obs(self, final: Tree, ended: Array) -> Array:
        layout = self.vec.spec.observation
        leaves = layout.flatten(final)
        result = np.full(self.num_envs, None, dtype=object)
        for row in np.flatnonzero(ended).tolist():
            # Copied, so that keeping one observation does not keep the whole batch.
            result[row] = layout.unflatten([leaf[row].copy() for leaf in leaves])
        return result

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vec.spec.name}, num_envs={self.num_envs})"
