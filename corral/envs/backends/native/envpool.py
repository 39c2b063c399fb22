"""EnvPool as a VecEnv: Gymnasium environments in C++, stepped by threads.

EnvPool uses next-step autoreset, and reports an episode that terminates in its last allowed step as truncated. So this
class resets every ended environment at once and counts the time limit itself, with EnvPool's own limit out of reach.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from corral.core import seeding
from corral.core.errors import EnvFailed, UserError
from corral.core.types import Array, EnvSpec, StepBatch, Tree
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.in_flight import InFlight
from corral.envs.stepping.row_infos import RowInfos
from corral.envs.stepping.rows import FIRST, GAME_OVER, TERMINATED, TRUNCATED, EnvRows
from corral.envs.vec_env import VecEnv

_NO_LIMIT = 2**31 - 1


class EnvPoolVecEnv(VecEnv):
    """VecEnv of one of EnvPool's tasks. `recv` steps all environments that were sent to at once."""

    def __init__(self, task: str, kwargs: Mapping[str, Any], num_envs: int, threads: int, role: str = "train"):
        self.num_envs, self._role, self._task = num_envs, role, task
        self._kwargs = {**kwargs, "num_envs": num_envs, "num_threads": threads}
        made = self._envpool("make_spec")
        limit = int(made.config.max_episode_steps)
        self._limit = limit if limit > 0 else _NO_LIMIT
        if self._limit < _NO_LIMIT:
            self._kwargs["max_episode_steps"] = self._limit + 1
        if made.config.max_num_players != 1:
            raise UserError(f"{task} has several players; Corral's environments have one.")
        with _quietly():
            observation, action = made.gymnasium_observation_space, made.gymnasium_action_space
        self.spec = EnvSpec(observation, action, task, self._limit if self._limit < _NO_LIMIT else None)
        self._rows = EnvRows(self.spec, num_envs)
        self._in_flight = InFlight(num_envs, self.spec)
        self._float_leaves = [k for k, leaf in enumerate(self.spec.observation.leaves) if leaf.dtype.kind == "f"]
        self._pool: Any = None

    def reset(self, seed: int = 0) -> None:
        """Start new seeded episodes everywhere, in a new pool because EnvPool's seeds are fixed."""
        self._in_flight.require_open()
        seeds = seeding.env_seeds(seed, self._role, self.num_envs)
        self._pool = self._envpool("make", env_type="gymnasium", env_seed=seeds)
        self._in_flight.start()
        rows = self._rows
        rows.reward[:] = rows.raw_reward[:] = 0.0
        rows.step[:] = 0
        rows.flags[:] = False
        rows.flags[:, FIRST] = True
        with _quietly():
            obs, info = self._pool.reset()
        if rows.infos is not None:
            rows.infos.clear()
            rows.infos.began_rows(self._in_flight.all_envs.ids, info)
        self._write(self._in_flight.all_envs.ids, obs)
        self._in_flight.complete(self._in_flight.all_envs.mask)

    def keep_infos(self, names: Sequence[str]) -> None:
        self._rows.infos = RowInfos(names)

    def send(self, env_ids: Array, actions: Tree) -> None:
        chosen, leaves = self._in_flight.send(env_ids, actions)
        self._rows.write_actions(chosen, leaves)

    def recv(self, min_ready: int | None = None, *, env_ids: Array | None = None) -> StepBatch:
        in_flight = self._in_flight
        if not in_flight.started:
            self.reset(self.seed)
        wanted, count = in_flight.wanted(min_ready, env_ids)
        if in_flight.num_ready(wanted) < count:
            self._step(in_flight.sets.of_mask(in_flight.in_flight))
        return self._rows.collect(in_flight.take(wanted))

    def close(self) -> None:
        """Delete the pool, which ends its threads."""
        self._in_flight.closed = True
        self._pool = None

    def _step(self, chosen: IdSet) -> None:
        rows, ids = self._rows, chosen.ids
        actions = self.spec.action.unflatten([leaf[ids] for leaf in rows.action])
        obs, reward, terminated, truncated, info = self._pool.step(actions, ids.astype(np.int32))
        rows.step[ids] += 1
        truncated = truncated | (rows.step[ids] >= self._limit)
        ended = terminated | truncated
        rows.reward[ids] = rows.raw_reward[ids] = reward
        flags = np.zeros((len(ids), rows.flags.shape[1]), np.bool_)
        flags[:, TERMINATED], flags[:, TRUNCATED] = terminated, truncated
        flags[:, FIRST] = flags[:, GAME_OVER] = ended
        rows.flags[ids] = flags
        self._write(ids, obs)
        if rows.infos is not None:
            rows.infos.stepped_rows(ids, info)
        if ended.any():
            over = ids[ended]
            for final, last in zip(rows.final, rows.obs, strict=True):
                final[over] = last[0, over]
            rows.step[over] = 0
            obs, info = self._pool.reset(over.astype(np.int32))
            if rows.infos is not None:
                rows.infos.began_rows(over, info)
            self._write(over, obs)
        if not np.isfinite(rows.reward[ids]).all():
            raise self._not_finite(ids[~np.isfinite(rows.reward[ids])])
        self._in_flight.complete(chosen.mask)

    def _write(self, ids: Array, obs: Tree) -> None:
        values = self.spec.observation.flatten(obs)
        for place, value in zip(self._rows.obs, values, strict=True):
            place[0, ids] = value  # the other half is for environments that fail in the middle of a step
        for k in self._float_leaves:
            finite = np.isfinite(values[k].reshape(len(ids), -1)).all(axis=1)
            if not finite.all():
                raise self._not_finite(ids[~finite])

    def _not_finite(self, ids: Array) -> EnvFailed:
        self.close()
        return EnvFailed(
            f"Environments {ids.tolist()} of EnvPool's {self._task} returned a value that is not finite; "
            "use backend='process', which replaces them."
        )

    def _envpool(self, function: str, **more: Any) -> Any:
        import envpool

        try:
            with _quietly():
                return getattr(envpool, function)(self._task, **more, **self._kwargs)
        except (TypeError, ValueError, AssertionError, KeyError) as error:
            raise UserError(f"EnvPool cannot make {self._task} with {self._kwargs}: {error}") from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress a warning about float64 bounds of float32 spaces at every start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
