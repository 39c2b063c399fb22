"""A ready-made `gymnasium.vector.VectorEnv` as a VecEnv, in any autoreset mode.

With next-step autoreset, the first observation of a new episode arrives one step of the whole vector later. The row is
held back until then, so `recv` may return fewer rows than there are environments; the caller sends to those it
received. Rows are therefore complete, and reset steps are never returned. The other modes always return all rows.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from corral.core.errors import EnvFailed, UserError
from corral.core.types import Array, EnvSpec, StepBatch, Tree
from corral.envs.backends.lockstep import LockstepVecEnv

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv as Sb3VecEnv

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
        self.withholds = self._mode is AutoresetMode.NEXT_STEP
        if isinstance(venv.unwrapped, SyncVectorEnv):
            venv.unwrapped.envs = [_Tidy(env) for env in venv.unwrapped.envs]
        self._float_leaves = [k for k, leaf in enumerate(spec.observation.leaves) if leaf.dtype.kind == "f"]
        # Next-step autoreset: rows whose first observation is due, and the steps that ended their episodes.
        self._due = np.zeros(self.num_envs, np.bool_)
        self._ends: _Step | None = None

    def as_gymnasium(self) -> VectorEnv:
        return self._venv

    def as_sb3(self) -> Sb3VecEnv:
        if self._mode is AutoresetMode.NEXT_STEP:
            raise UserError(
                f"Stable-Baselines3 resets in the same step, {self.spec.name} one step later: build it with "
                "autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP."
            )
        return super().as_sb3()

    def _restart(self, seeds: list[int]) -> Tree:
        self._due[:] = False
        try:
            obs, _ = self._venv.reset(seed=seeds)  # type: ignore[arg-type]
        except (TypeError, ValueError, gymnasium.error.Error):
            # The interface only guarantees a single seed; Gymnasium's own two classes accept a list.
            obs, _ = self._venv.reset(seed=seeds[0])
        leaves = self._copy(obs)
        self._require_finite(leaves, np.zeros(self.num_envs))
        return self.spec.observation.unflatten(leaves)

    def _launch(self, actions: Tree) -> None:
        self._sent = actions

    def _collect(self) -> tuple[StepBatch, Array]:
        step = self._step()
        if self._mode is AutoresetMode.NEXT_STEP:
            return self._collect_next_step(step)
        batch = step.batch(self.spec, self._in_flight.everyone.ids)
        if (ended := step.ended).any():
            if self._mode is AutoresetMode.SAME_STEP:
                batch.final_obs = self._final_obs(step)
            else:
                batch.final_obs = self.spec.observation.unflatten([leaf.copy() for leaf in step.obs])
                first = self._copy(self._venv.reset(options={"reset_mask": ended.copy()})[0])
                self._require_finite(first, step.reward)
                for leaf, fresh in zip(step.obs, first, strict=True):
                    leaf[ended] = fresh[ended]
        return batch, self._in_flight.everyone.ids

    def _collect_next_step(self, step: _Step) -> tuple[StepBatch, Array]:
        """Complete the rows whose first observation arrived; hold back the rows whose episode just ended."""
        while True:
            due, ends = self._due, self._ends
            if (step.ended & due).any():
                raise EnvFailed(f"{self.spec.name}: an episode ended in the very step that started it.")
            complete = ~step.ended
            merged = step
            if due.any():
                assert ends is not None
                merged = step.with_ends(ends, due)
            self._due = step.ended
            if step.ended.any():
                self._ends = step
            if complete.any():
                batch = merged.batch(self.spec, self._in_flight.everyone.ids)
                if due.any():
                    assert ends is not None
                    final = [
                        np.where(_column(due, leaf), end, leaf) for end, leaf in zip(ends.obs, step.obs, strict=True)
                    ]
                    batch.final_obs = self.spec.observation.unflatten(final)
                return batch, np.flatnonzero(complete)
            step = self._step()  # all episodes ended at once: no row can be returned, so step again

    def _step(self) -> _Step:
        """Step the vector; environments that are due to reset ignore their action, so the last one is repeated."""
        obs, reward, terminated, truncated, info = self._venv.step(self._sent)
        rewards = np.array(reward, np.float64).reshape(self.num_envs)
        step = _Step(
            self._copy(obs),
            rewards,
            rewards.copy(),
            np.array(terminated, np.bool_),
            np.array(truncated, np.bool_),
        )
        step.read(info, self._mode)
        self._require_finite(step.obs, step.reward)
        return step

    def _final_obs(self, step: _Step) -> Tree:
        found = step.final_obs
        if found is None:
            raise UserError(f"{self.spec.name} says SAME_STEP autoreset but leaves no infos['final_obs'].")
        layout = self.spec.observation
        leaves = [leaf.copy() for leaf in step.obs]
        one_by_one = isinstance(found, np.ndarray) and found.dtype == object
        whole = None if one_by_one else layout.flatten(found)
        for i in np.flatnonzero(step.ended).tolist():
            values = layout.flatten(found[i]) if whole is None else [leaf[i] for leaf in whole]
            for leaf, value in zip(leaves, values, strict=True):
                leaf[i] = value
        self._require_finite(leaves, step.reward)
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

    def _require_finite(self, leaves: list[Array], reward: Array) -> None:
        floats = [leaves[k] for k in self._float_leaves]
        if np.isfinite(reward).all() and all(np.isfinite(leaf).all() for leaf in floats):
            return
        bad = ~np.isfinite(reward)
        for leaf in floats:
            bad |= ~np.isfinite(leaf.reshape(self.num_envs, -1)).all(axis=1)
        raise EnvFailed(
            f"Environments {np.flatnonzero(bad).tolist()} of {self.spec.name} returned a value that is not "
            "finite; they cannot be replaced in a ready-made vector environment, so give make_vec a factory."
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


class _Step:
    def __init__(self, obs: list[Array], reward: Array, raw_reward: Array, terminated: Array, truncated: Array):
        self.obs, self.reward, self.raw_reward = obs, reward, raw_reward
        self.terminated, self.truncated = terminated, truncated
        self.ended = terminated | truncated
        self.game_over = self.ended.copy()
        self.final_obs: Any = None

    def read(self, info: dict[str, Any], mode: AutoresetMode) -> None:
        self.final_obs = info.get("final_obs")
        same_step = mode is AutoresetMode.SAME_STEP
        # With same-step autoreset, the infos of an ended row belong to its reset; those of the step are in
        # `final_info`.
        for source, rows in (
            (info, ~self.ended if same_step else None),
            (info.get("final_info"), self.ended),
        ):
            if isinstance(source, dict):
                _read(source, "raw_reward", rows, self.raw_reward)
                life_lost = np.zeros_like(self.ended)
                _read(source, "life_lost", rows, life_lost)
                self.game_over &= ~life_lost

    def with_ends(self, ends: _Step, due: Array) -> _Step:
        """This step's observations, with the rewards and flags of the earlier steps that ended episodes."""
        merged = _Step(
            self.obs,
            np.where(due, ends.reward, self.reward),
            np.where(due, ends.raw_reward, self.raw_reward),
            np.where(due, ends.terminated, self.terminated),
            np.where(due, ends.truncated, self.truncated),
        )
        merged.game_over = np.where(due, ends.game_over, self.game_over)
        return merged

    def batch(self, spec: EnvSpec, ids: Array) -> StepBatch:
        return StepBatch(
            ids,
            spec.observation.unflatten(self.obs),
            self.reward,
            self.raw_reward,
            self.terminated,
            self.truncated,
            None,
            self.ended,
            np.zeros(len(ids), np.bool_),
            self.game_over,
        )


def _read(info: dict[str, Any], key: str, rows: Array | None, into: Array) -> None:
    """Copy the values of `key` selected by Gymnasium's mask and by `rows`."""
    if key not in info:
        return
    present = info.get(f"_{key}", np.ones(len(into), np.bool_))
    chosen = present if rows is None else present & rows
    into[chosen] = info[key][chosen]


def _column(mask: Array, leaf: Array) -> Array:
    return mask.reshape(-1, *[1] * (leaf.ndim - 1))


def _autoreset_mode(venv: VectorEnv) -> AutoresetMode:
    mode = venv.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError:
        raise UserError(
            f"{type(venv.unwrapped).__name__} does not say how it resets: set metadata['autoreset_mode'] to "
            "gymnasium.vector.AutoresetMode.NEXT_STEP, SAME_STEP or DISABLED."
        ) from None
