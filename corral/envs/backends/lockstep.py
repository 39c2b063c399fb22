"""Environments that only step all together: the part that vector environments of others have in common.

A step starts as soon as every environment has its action. `recv(min_ready)` returns everybody who is ready,
which is everybody, and `recv(env_ids)` still chooses whose results to take; but no further step happens
before the others were received and sent to as well.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from corral.core import seeding
from corral.core.errors import UserError
from corral.core.types import Array, EnvSpec, StepBatch, Tree
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.in_flight import InFlight
from corral.envs.vec_env import VecEnv


class LockstepVecEnv(VecEnv):
    """VecEnv whose environments step all together."""

    def __init__(self, spec: EnvSpec, num_envs: int, role: str):
        self.spec, self.num_envs, self._role = spec, num_envs, role
        self._in_flight = InFlight(num_envs, spec)
        self._actions = spec.action.empty(num_envs)
        self._stepping = False
        self._batch: StepBatch | None = None  # everybody's rows, until the last of them is received

    # -- what a kind of vector environment must do ----------------------------------------------------------

    @abstractmethod
    def _restart(self, seeds: list[int]) -> Tree:
        """Start seeded episodes, whatever is under way; returns first observations in arrays of their own."""

    @abstractmethod
    def _launch(self, actions: Tree) -> None:
        """Begin a step with everybody's actions."""

    @abstractmethod
    def _collect(self) -> tuple[StepBatch, Array]:
        """Finish the step; returns everybody's rows, in arrays of their own, and whose rows are complete."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of the environments."""

    # -- the contract ---------------------------------------------------------------------------------------

    def reset(self, seed: int = 0) -> None:
        """Start new seeded episodes everywhere."""
        self._in_flight.start()
        self._stepping = False
        try:
            obs = self._restart(seeding.env_seeds(seed, self._role, self.num_envs))
        except BaseException:
            self.close()
            raise
        n = self.num_envs
        no, yes = np.zeros(n, np.bool_), np.ones(n, np.bool_)
        ids = self._in_flight.everyone.ids
        self._batch = StepBatch(
            ids, obs, np.zeros(n), np.zeros(n), no, no.copy(), None, yes, no.copy(), no.copy()
        )  # fmt: skip
        self._in_flight.complete(self._in_flight.everyone.mask)

    def send(self, env_ids: Array, actions: Tree) -> None:
        """Hand over actions; the step begins when nobody is left without one."""
        chosen, leaves = self._in_flight.send(env_ids, actions)
        for row, leaf in zip(self._actions, leaves, strict=True):
            row[chosen.index] = leaf
        if self._in_flight.in_flight == self._in_flight.everyone.mask:
            self._stepping = True
            self._launch(self.spec.action.unflatten([leaf.copy() for leaf in self._actions]))

    def recv(self, min_ready: int | None = None, *, env_ids: Array | None = None) -> StepBatch:
        """Results of the step under way, or what is left of the last one."""
        in_flight = self._in_flight
        if not in_flight.started:
            self.reset(self.seed)
        wanted, count = in_flight.wanted(min_ready, env_ids)
        if self._stepping:
            self._finish()
        ready = in_flight.num_ready(wanted)
        if ready == 0 or (wanted is not None and ready < count):
            raise self._stuck()
        return self._take(in_flight.take(wanted))

    def close(self) -> None:
        """Close every environment."""
        if not self._in_flight.closed:
            self._in_flight.closed = True
            self._release()

    def _finish(self) -> None:
        self._stepping = False
        try:
            self._batch, complete = self._collect()
        except BaseException:
            self.close()
            raise
        self._in_flight.complete(self._in_flight.sets.of(complete).mask)

    def _take(self, chosen: IdSet) -> StepBatch:
        """Hand these rows over, without a copy when they are all there are."""
        batch = self._batch
        assert batch is not None
        if chosen is self._in_flight.everyone:
            self._batch = None
            return batch
        return batch.take(chosen.ids)

    def _stuck(self) -> UserError:
        """Why the results asked for cannot come yet."""
        in_flight = self._in_flight
        ready = [i for i in range(self.num_envs) if in_flight.ready >> i & 1]
        idle = [i for i in range(self.num_envs) if not (in_flight.ready | in_flight.in_flight) >> i & 1]
        remedies = [f"recv() environments {ready[:16]}"] * bool(ready) + [f"send() to environments {idle[:16]}"] * bool(
            idle
        )
        return UserError(
            f"{self.spec.name}: these environments step only all together; {' and '.join(remedies)} first."
        )
