"""Steps of single environments, in whatever order they arrive, into trajectories."""

from __future__ import annotations

from typing import Any

import numpy as np

from corral.types import Array, EnvSpec, StepBatch, Trajectory, Tree, tree_map


class Columns:
    """One column of `length` steps per environment, each filled at its own pace.

    `begin` lays the first observations, `act` notes what was decided on a row's latest observation, `put`
    notes what followed. `take` hands out full columns and starts them anew from their last observation.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, length: int):
        self._spec, self._length = spec, length
        self._cursor = np.zeros(num_envs, np.int64)
        self._obs = spec.observation.empty(length + 1, num_envs)
        self._action = spec.action.empty(length, num_envs)
        self._first = np.zeros((length + 1, num_envs), np.bool_)
        self._reward = np.zeros((length, num_envs), np.float32)
        self._raw_reward = np.zeros((length, num_envs), np.float64)
        self._terminated, self._truncated, self._faulty = (np.zeros((length, num_envs), np.bool_) for _ in range(3))
        self._extras: dict[str, Array] = {}
        self._finals: dict[tuple[int, int], list[Array]] = {}  # (t, env) -> leaves

    def begin(self, ids: Array, obs: Tree, first: Array) -> None:
        """Lay the first observations of these columns."""
        for store, leaf in zip(self._obs, self._spec.observation.flatten(obs), strict=True):
            store[0, ids] = leaf
        self._first[0, ids] = first

    def act(self, ids: Array, actions: list[Array], extras: dict[str, Any]) -> None:
        """Note the actions chosen on the latest observations."""
        t = self._cursor[ids]
        for store, leaf in zip(self._action, actions, strict=True):
            store[t, ids] = leaf
        for name, value in extras.items():
            if name not in self._extras:
                self._extras[name] = np.zeros((self._length, len(self._cursor), *value.shape[1:]), value.dtype)
            elif (kept := self._extras[name]).dtype != value.dtype:
                self._extras[name] = kept.astype(np.result_type(kept.dtype, value.dtype))
            self._extras[name][t, ids] = value

    def put(self, batch: StepBatch) -> None:
        """Note what followed."""
        ids = batch.env_ids
        t = self._cursor[ids]
        self._reward[t, ids] = batch.reward
        self._raw_reward[t, ids] = batch.raw_reward
        self._terminated[t, ids] = batch.terminated
        self._truncated[t, ids] = batch.truncated
        self._faulty[t, ids] = batch.faulty
        self._first[t + 1, ids] = batch.first
        for store, leaf in zip(self._obs, self._spec.observation.flatten(batch.obs), strict=True):
            store[t + 1, ids] = leaf
        if batch.final_obs is not None:
            finals = self._spec.observation.flatten(batch.final_obs)
            for row in np.flatnonzero(batch.terminated | batch.truncated):
                self._finals[int(t[row]), int(ids[row])] = [leaf[row] for leaf in finals]
        self._cursor[ids] = t + 1

    def room(self, ids: Array) -> Array:
        """Which of these environments still have steps to go."""
        return ids[self._cursor[ids] < self._length]

    def full(self) -> Array:
        """Environments whose columns are full."""
        return np.flatnonzero(self._cursor == self._length)

    def take(self, ids: Array, version: int) -> Trajectory:
        """Copy these full columns out, and start them anew."""
        unflatten = self._spec.observation.unflatten
        place = {int(env_id): column for column, env_id in enumerate(ids)}
        finals = sorted((key for key in self._finals if key[1] in place), key=lambda k: (k[0], place[k[1]]))
        rows = [self._finals.pop(key) for key in finals]
        final_obs = [
            np.stack([row[k] for row in rows]) if rows else np.zeros((0, *leaf.shape), leaf.dtype)
            for k, leaf in enumerate(self._spec.observation.leaves)
        ]
        traj = Trajectory(
            obs=unflatten([leaf[:, ids] for leaf in self._obs]),
            action=self._spec.action.unflatten([leaf[:, ids] for leaf in self._action]),
            reward=self._reward[:, ids],
            raw_reward=self._raw_reward[:, ids],
            terminated=self._terminated[:, ids],
            truncated=self._truncated[:, ids],
            faulty=self._faulty[:, ids],
            first=self._first[:, ids],
            env_id=ids.copy(),
            final_at=np.array([(t, place[i]) for t, i in finals], np.int64).reshape(-1, 2),
            final_obs=unflatten(final_obs),
            version=np.full(len(ids), version, np.int64),
            extras={name: value[:, ids] for name, value in self._extras.items()},
        )
        self.begin(ids, tree_map(lambda leaf: leaf[-1], traj.obs), traj.first[-1])
        self._cursor[ids] = 0
        return traj
