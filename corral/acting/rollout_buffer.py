"""Collects the steps of many environments into trajectories."""

from __future__ import annotations

from typing import Any

import numpy as np

from corral.acting.policy import to_numpy
from corral.core.types import Array, EnvSpec, StepBatch, Trajectory

Envs = slice | Array
"""Environments: a slice if they are consecutive, which is much cheaper, or an array of ids."""
Time = int | Array
"""Step indices: one number if these environments are in step, or one for each."""
_Finals = tuple[Time, Array, list[Array]]  # when and where episodes ended, and the leaves of their final observations


class RolloutBuffer:
    """One column of `length` steps per environment; columns fill independently.

    `begin` sets the first observations, `act` records the actions for the observations of step `t`, `put` records the
    results. `take` returns full columns and restarts them from their last observation.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, length: int):
        self._spec, self._length, self._num_envs = spec, length, num_envs
        self._obs = spec.observation.empty(length + 1, num_envs)
        self._action = spec.action.empty(length, num_envs)
        self._first = np.zeros((length + 1, num_envs), np.bool_)
        self._reward = np.zeros((length, num_envs), np.float64)
        self._raw_reward = np.zeros((length, num_envs), np.float64)
        self._terminated, self._truncated, self._faulty = (np.zeros((length, num_envs), np.bool_) for _ in range(3))
        self._extras: dict[str, Array] = {}
        self._finals: list[_Finals] = []

    def begin(self, envs: Envs, obs: list[Array], first: Array) -> None:
        for store, leaf in zip(self._obs, obs, strict=True):
            store[0, envs] = leaf
        self._first[0, envs] = first

    def act(self, t: Time, envs: Envs, actions: list[Array], extras: dict[str, Any]) -> None:
        """Record the actions for the observations of step `t`, and the extras (arrays or tensors)."""
        for store, leaf in zip(self._action, actions, strict=True):
            store[t, envs] = leaf
        for name, value in extras.items():
            if type(value) is not np.ndarray:
                value = to_numpy(value)
            kept = self._extras.get(name)
            if kept is None:
                kept = np.zeros((self._length, self._num_envs, *value.shape[1:]), value.dtype)
                self._extras[name] = kept
            elif kept.dtype != value.dtype:
                kept = self._extras[name] = kept.astype(np.result_type(kept.dtype, value.dtype))
            kept[t, envs] = value

    def put(self, t: Time, envs: Envs, obs: list[Array], batch: StepBatch) -> None:
        """Record the results of step `t`; `obs` are the leaves of the batch's observations."""
        self._reward[t, envs] = batch.reward
        self._raw_reward[t, envs] = batch.raw_reward
        self._terminated[t, envs] = batch.terminated
        self._truncated[t, envs] = batch.truncated
        self._faulty[t, envs] = batch.faulty
        self._first[t + 1, envs] = batch.first
        for store, leaf in zip(self._obs, obs, strict=True):
            store[t + 1, envs] = leaf
        if batch.final_obs is not None:
            rows = (batch.terminated | batch.truncated).nonzero()[0]
            leaves = [leaf[rows] for leaf in self._spec.observation.flatten(batch.final_obs)]
            self._finals.append((t if isinstance(t, int) else t[rows], batch.env_ids[rows], leaves))

    def seen(self, t: int, envs: Envs) -> tuple[list[Array], Array]:
        """Observations of step `t`, and which of them begin an episode."""
        return [store[t, envs] for store in self._obs], self._first[t, envs]

    def take(self, envs: Envs, ids: Array, version: int | Array) -> Trajectory:
        """Copy these full columns and restart them; `ids` are the same environments by number."""

        def copy(store: Array) -> Array:
            columns: Array = store[:, envs]
            return columns.copy() if isinstance(envs, slice) else columns  # indexing by ids copies already

        layout = self._spec.observation
        final_at, final_obs = self._take_finals(ids)
        obs = [copy(leaf) for leaf in self._obs]
        first = copy(self._first)
        self.begin(envs, [leaf[-1] for leaf in obs], first[-1])
        with np.errstate(over="ignore"):  # overflow of float32 becomes infinite, which the learner skips and reports
            reward = self._reward[:, envs].astype(np.float32, order="C")
        return Trajectory(
            obs=layout.unflatten(obs),
            action=self._spec.action.unflatten([copy(leaf) for leaf in self._action]),
            reward=reward,
            raw_reward=copy(self._raw_reward),
            terminated=copy(self._terminated),
            truncated=copy(self._truncated),
            faulty=copy(self._faulty),
            first=first,
            env_id=ids.copy(),
            final_at=final_at,
            final_obs=layout.unflatten(final_obs),
            version=np.full(len(ids), version, np.int64),
            extras={name: copy(value) for name, value in self._extras.items()},
        )

    def _take_finals(self, ids: Array) -> tuple[Array, list[Array]]:
        """Indices and final observations of the episodes that ended in these columns, ordered by time and column."""
        if not self._finals:
            empty = [np.zeros((0, *leaf.shape), leaf.dtype) for leaf in self._spec.observation.leaves]
            return np.zeros((0, 2), np.int64), empty
        times = np.concatenate([np.broadcast_to(t, len(envs)) for t, envs, _ in self._finals])
        envs = np.concatenate([envs for _, envs, _ in self._finals])
        leaves = [np.concatenate(parts) for parts in zip(*(leaves for *_, leaves in self._finals), strict=True)]
        place = np.full(self._num_envs, -1)
        place[ids] = np.arange(len(ids))
        columns = place[envs]
        others = columns < 0
        self._finals = [(times[others], envs[others], [leaf[others] for leaf in leaves])] if others.any() else []
        order = np.lexsort((columns, times))
        order = order[columns[order] >= 0]
        return np.stack([times[order], columns[order]], axis=1), [leaf[order] for leaf in leaves]
