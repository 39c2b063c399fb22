"""A ready-made `gymnasium.vector.VectorEnv` as a VecEnv, in any autoreset mode.

With next-step autoreset, the first observation of a new episode arrives one step of the whole vector later. The row is
held back until then, so `recv` may return fewer rows than there are environments; the caller sends to those it
received. Rows are therefore complete, and reset steps are never returned. The other modes always return all rows.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from corral.core.errors import EnvFailed, UserError
from corral.core.types import Array, EnvSpec, StepBatch, Tree, tree_map
from corral.envs.backends.lockstep import LockstepVecEnv

VectorEnv = gymnasium.vector.VectorEnv[Any, Any, Any]


class VectorVecEnv(LockstepVecEnv):
    """VecEnv over a user's vector environment, which it closes at the end; a failure in it ends the run."""

    def __init__(self, venv: VectorEnv, role: str = "train"):
        self._mode = _autoreset_mode(venv)
        name = getattr(venv.spec, "id", None) or type(venv.unwrapped).__name__
        limit = getattr(venv.spec, "max_episode_steps", None)
        spec = EnvSpec(venv.single_observation_space, venv.single_action_space, name, limit)
        super().__init__(spec, venv.num_envs, role)
        self._venv = venv
        self.holds_back_rows = self._mode is AutoresetMode.NEXT_STEP
        if isinstance(venv.unwrapped, SyncVectorEnv):
            venv.unwrapped.envs = [_Tidy(env) for env in venv.unwrapped.envs]
        self._float_leaves = [k for k, leaf in enumerate(spec.observation.leaves) if leaf.dtype.kind == "f"]
        # Next-step autoreset: rows whose first observation is due, and the steps that ended their episodes.
        self._due = np.zeros(self.num_envs, np.bool_)
        self._ends: StepBatch | None = None

    def as_gymnasium(self, autoreset: str | AutoresetMode | None = None) -> VectorEnv:
        if autoreset is not None:
            from corral.envs.adapters.as_gymnasium import autoreset_mode

            if autoreset_mode(autoreset) is not self._mode:
                raise UserError(f"{self.spec.name} was built with autoreset {self._mode.value}, which cannot change.")
        return self._venv

    def _restart(self, seeds: list[int]) -> Tree:
        self._due[:] = False
        try:
            obs, info = self._venv.reset(seed=seeds)  # type: ignore[arg-type]
        except (TypeError, ValueError, gymnasium.error.Error):
            # The interface only guarantees a single seed; Gymnasium's own two classes accept a list.
            obs, info = self._venv.reset(seed=seeds[0])
        if self._infos is not None:
            self._infos.began_rows(self._in_flight.all_envs.ids, info)
        leaves = self._copy(obs)
        self._require_good(leaves, np.zeros(self.num_envs))
        return self.spec.observation.unflatten(leaves)

    def _launch(self, actions: Tree) -> None:
        self._sent = actions

    def _collect(self) -> tuple[StepBatch, Array]:
        batch, final = self._step()
        if self._mode is AutoresetMode.NEXT_STEP:
            return self._collect_next_step(batch)
        if (ended := batch.first).any():
            if self._mode is AutoresetMode.SAME_STEP:
                batch.final_obs = self._final_obs(batch, final)
            else:
                batch.final_obs = tree_map(np.copy, batch.obs)
                obs, info = self._venv.reset(options={"reset_mask": ended.copy()})
                if self._infos is not None:
                    self._infos.began_rows(batch.env_ids, info, ended)
                first = self._copy(obs)
                self._require_good(first, batch.reward)
                for leaf, fresh in zip(self.spec.observation.flatten(batch.obs), first, strict=True):
                    leaf[ended] = fresh[ended]
        return batch, self._in_flight.all_envs.ids

    def _collect_next_step(self, step: StepBatch) -> tuple[StepBatch, Array]:
        """Complete the rows whose first observation arrived; hold back the rows whose episode just ended."""
        while True:
            due, ends, ended = self._due, self._ends, step.first
            if (ended & due).any():
                raise EnvFailed(f"{self.spec.name}: an episode ended in the step that started it.")
            self._due = ended
            if ended.any():
                self._ends = step
            if not ended.all():
                batch = step if ends is None or not due.any() else _with_ends(step, ends, due)
                return batch, np.flatnonzero(~ended)
            step, _ = self._step()  # all episodes ended at once: no row can be returned, so step again

    def _step(self) -> tuple[StepBatch, Any]:
        """Step the vector; rows that are due to reset ignore their action. Also returns `final_obs` of its infos."""
        obs, reward, terminated, truncated, info = self._venv.step(self._sent)
        leaves, rewards = self._copy(obs), np.array(reward, np.float64).reshape(self.num_envs)
        self._require_good(leaves, rewards)
        terminated, truncated = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        obs = self.spec.observation.unflatten(leaves)
        batch, ended = self._all_rows(obs, rewards, rewards.copy(), terminated, truncated), terminated | truncated
        # With same-step autoreset, the infos of an ended row are of its reset; those of the step are in `final_info`.
        same_step = self._mode is AutoresetMode.SAME_STEP
        if self._infos is not None:
            began = ended if same_step else self._due
            self._infos.stepped_rows(batch.env_ids, info, ~began)
            if same_step and ended.any():
                self._infos.stepped_rows(batch.env_ids, info.get("final_info", {}), ended)
            self._infos.began_rows(batch.env_ids, info, began)
        for source, rows in ((info, ~ended if same_step else None), (info.get("final_info"), ended)):
            if isinstance(source, dict):
                _read(source, "raw_reward", rows, batch.raw_reward)
                life_lost = np.zeros_like(ended)
                _read(source, "life_lost", rows, life_lost)
                batch.game_over &= ~life_lost
        return batch, info.get("final_obs")

    def _final_obs(self, batch: StepBatch, found: Any) -> Tree:
        if found is None:
            raise UserError(
                f"{self.spec.name} declares SAME_STEP autoreset but its infos have no 'final_obs': add it, or correct "
                "metadata['autoreset_mode']."
            )
        layout = self.spec.observation
        leaves = [leaf.copy() for leaf in layout.flatten(batch.obs)]
        one_by_one = isinstance(found, np.ndarray) and found.dtype == object
        whole = None if one_by_one else layout.flatten(found)
        for i in np.flatnonzero(batch.first).tolist():
            values = layout.flatten(found[i]) if whole is None else [leaf[i] for leaf in whole]
            for leaf, value in zip(leaves, values, strict=True):
                leaf[i] = value
        self._require_good(leaves, batch.reward)
        return layout.unflatten(leaves)

    def _copy(self, obs: Any) -> list[Array]:
        """Observation leaves, copied because a vector environment may reuse its buffers."""
        layout, n = self.spec.observation, self.num_envs
        try:
            leaves = [np.array(v, leaf.dtype) for v, leaf in zip(layout.flatten(obs), layout.leaves, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{self.spec.name}: its observations do not fit {layout.space} ({error}).") from error
        for array, leaf in zip(leaves, layout.leaves, strict=True):
            if array.shape != (n, *leaf.shape):
                raise UserError(
                    f"{self.spec.name}: observation leaf '{leaf.name}' has shape {array.shape}, expected "
                    f"{(n, *leaf.shape)} for {n} environments."
                )
        return leaves

    def _require_good(self, leaves: list[Array], reward: Array) -> None:
        floats = [leaves[k] for k in self._float_leaves]
        outside = self.spec.observation.outside(leaves)
        if outside is not None:
            first = self.spec.observation.range_problem([leaf[outside.argmax()] for leaf in leaves])
            raise EnvFailed(
                f"Environments {np.flatnonzero(outside).tolist()} of {self.spec.name} returned an observation outside "
                f"its space ({first}); they cannot be replaced in a ready-made vector environment, so give make_vec a "
                "factory."
            )
        if np.isfinite(reward).all() and all(np.isfinite(leaf).all() for leaf in floats):
            return
        bad = ~np.isfinite(reward)
        for leaf in floats:
            bad |= ~np.isfinite(leaf.reshape(self.num_envs, -1)).all(axis=1)
        raise EnvFailed(
            f"Environments {np.flatnonzero(bad).tolist()} of {self.spec.name} returned a value that is not "
            "finite, and environments of a VectorEnv cannot be replaced: pass make_vec a factory."
        )

    def _release(self) -> None:
        self._venv.close()


class _Tidy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Works around SyncVectorEnv: reset overwrites the buffer of final observations, and rewards may be arrays."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            obs = copy.deepcopy(obs)
        return obs, np.asarray(reward).item(), terminated, truncated, info


def _with_ends(step: StepBatch, ends: StepBatch, due: Array) -> StepBatch:
    """The observations of a step, with the results of the earlier step that ended episodes in the rows that are due."""
    names = ("reward", "raw_reward", "terminated", "truncated", "first", "game_over")
    merged = replace(step, **{name: np.where(due, getattr(ends, name), getattr(step, name)) for name in names})
    merged.final_obs = tree_map(
        lambda end, leaf: np.where(due.reshape(-1, *[1] * (leaf.ndim - 1)), end, leaf), ends.obs, step.obs
    )
    return merged


def _read(info: dict[str, Any], key: str, rows: Array | None, into: Array) -> None:
    """Copy the values of `key` selected by Gymnasium's mask and by `rows`."""
    if key not in info:
        return
    present = info.get(f"_{key}", np.ones(len(into), np.bool_))
    chosen = present if rows is None else present & rows
    into[chosen] = info[key][chosen]


def _autoreset_mode(venv: VectorEnv) -> AutoresetMode:
    mode = venv.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError:
        raise UserError(
            f"{type(venv.unwrapped).__name__} does not declare its autoreset mode: set metadata['autoreset_mode'] to "
            "gymnasium.vector.AutoresetMode.NEXT_STEP, SAME_STEP or DISABLED."
        ) from None
