"""Environments that only step all together: the shared base of adapters for other vector environments.

A step starts once every environment has its action. `recv(min_ready)` returns all environments; `recv(env_ids)` returns
the chosen ones, but the next step starts only after the others were received and sent to as well.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from corral.core import seeding
from corral.core.errors import UserError
from corral.core.types import Array, EnvSpec, StepBatch, Tree
from corral.envs.stepping.in_flight import InFlight
from corral.envs.stepping.row_infos import RowInfos
from corral.envs.vec_env import VecEnv


class LockstepVecEnv(VecEnv):
    """VecEnv whose environments step all together."""

    def __init__(self, spec: EnvSpec, num_envs: int, role: str):
        self.spec, self.num_envs, self._role = spec, num_envs, role
        self._in_flight = InFlight(num_envs, spec)
        self._actions = spec.action.empty(num_envs)
        self._stepping = False
        self._infos: RowInfos | None = None  # values of `info`, if asked for
        self._batch: StepBatch | None = None  # rows of all environments, until the last of them is received

    @abstractmethod
    def _restart(self, seeds: list[int]) -> Tree:
        """Start seeded episodes, dropping any step in flight; returns first observations in new arrays."""

    @abstractmethod
    def _launch(self, actions: Tree) -> None: ...

    @abstractmethod
    def _collect(self) -> tuple[StepBatch, Array]:
        """Finish the step; returns all rows in new arrays, and the ids of the complete ones."""

    @abstractmethod
    def _release(self) -> None: ...

    def reset(self, seed: int = 0) -> None:
        self._in_flight.start()
        self._stepping = False
        if self._infos is not None:
            self._infos.clear()
        try:
            obs = self._restart(seeding.env_seeds(seed, self._role, self.num_envs))
        except BaseException:
            self.close()
            raise
        rewards, ends = np.zeros((2, self.num_envs)), np.zeros((2, self.num_envs), np.bool_)
        self._batch = self._all_rows(obs, *rewards, *ends)
        self._batch.first[:] = True
        self._in_flight.complete(self._in_flight.all_envs.mask)

    def keep_infos(self, names: Sequence[str]) -> None:
        self._infos = RowInfos(names)

    def send(self, env_ids: Array, actions: Tree) -> None:
        chosen, leaves = self._in_flight.send(env_ids, actions)
        for row, leaf in zip(self._actions, leaves, strict=True):
            row[chosen.index] = leaf
        if self._in_flight.in_flight == self._in_flight.all_envs.mask:
            self._stepping = True
            self._launch(self.spec.action.unflatten([leaf.copy() for leaf in self._actions]))

    def recv(self, min_ready: int | None = None, *, env_ids: Array | None = None) -> StepBatch:
        in_flight = self._in_flight
        if not in_flight.started:
            self.reset(self.seed)
        wanted, count = in_flight.wanted(min_ready, env_ids)
        if self._stepping:
            self._stepping = False
            try:
                self._batch, complete = self._collect()
            except BaseException:
                self.close()
                raise
            in_flight.complete(in_flight.sets.of(complete).mask)
        ready = in_flight.num_ready(wanted)
        if ready == 0 or (wanted is not None and ready < count):
            raise self._stuck()
        batch, chosen = self._batch, in_flight.take(wanted)
        assert batch is not None
        if chosen is not in_flight.all_envs:
            batch = batch.take(chosen.ids)
        else:
            self._batch = None
        if self._infos is not None:
            batch.infos, batch.first_infos = self._infos.collect(chosen.numbers)
        return batch

    def close(self) -> None:
        if not self._in_flight.closed:
            self._in_flight.closed = True
            self._release()

    def _all_rows(self, obs: Tree, reward: Array, raw_reward: Array, terminated: Array, truncated: Array) -> StepBatch:
        """A step of all environments, with same-step autoreset and without faults."""
        ids, ended, no = self._in_flight.all_envs.ids, terminated | truncated, np.zeros(self.num_envs, np.bool_)
        return StepBatch(ids, obs, reward, raw_reward, terminated, truncated, None, ended, no, ended.copy())

    def _stuck(self) -> UserError:
        in_flight = self._in_flight
        ready = [i for i in range(self.num_envs) if in_flight.ready >> i & 1]
        idle = [i for i in range(self.num_envs) if not (in_flight.ready | in_flight.in_flight) >> i & 1]
        remedies = [f"recv() environments {ready[:16]}"] * bool(ready)
        remedies += [f"send() to environments {idle[:16]}"] * bool(idle)
        first = " and ".join(remedies)
        return UserError(f"{self.spec.name}: these environments step only together: {first} first.")
