"""Sampling with the user's own policy: `Sampler(env, policy).rollouts(steps)` yields plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from corral.acting.assemble import Columns
from corral.acting.episodes import EpisodeStats
from corral.acting.policy import Policy, as_policy, to_numpy
from corral.envs.contract import VecEnv
from corral.envs.make import make_vec
from corral.envs.resolve import EnvLike
from corral.errors import UserError
from corral.types import Array, StepBatch, Trajectory, Tree, tree_map


class Sampler:
    """Runs a policy in many environments.

    The policy is a function of a batch of observations, or a `Policy` with state. It is called with whatever
    environments are due, so the batch size varies between calls and the policy must not assume it.

    On the process backend the environments are decided for in two halves: one half steps while the policy
    looks at the other. The halves do not depend on the number of workers, so neither do the trajectories.
    """

    def __init__(
        self,
        env: EnvLike | VecEnv,
        policy: Policy | Callable[[Tree], Tree],
        num_envs: int = 64,
        backend: str = "auto",
        workers: int | None = None,
        seed: int = 0,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
    ):
        self._policy = as_policy(policy)
        self._owns_vec = not isinstance(env, VecEnv)
        self.vec = (
            env if isinstance(env, VecEnv) else make_vec(env, num_envs, backend, workers, seed, env_kwargs=env_kwargs)
        )
        self.episodes = EpisodeStats(self.vec.num_envs)
        self.version = 0
        """Stamped on trajectories; raise it when the policy's weights change."""
        self._latest: tuple[list[Array], Array] | None = None  # observations and firsts, per environment
        self._state: Tree = None
        self._in_flight = np.zeros(self.vec.num_envs, np.bool_)
        self._turn = 0

    def rollouts(self, steps: int = 128, *, first_ready: int | None = None) -> Iterator[Trajectory]:
        """Yield trajectories of `steps` steps, for ever: fragments that follow on, episodes going through them.

        Every trajectory has all environments, in order. With `first_ready=k` it has the environments, at least
        `k` of them, that were first to fill their fragment, so that a slow one holds nobody up; `env_id`
        says which. The policy may be changed between two trajectories. A new call drops fragments that the
        last one had not finished.
        """
        if steps < 1:
            raise UserError(f"rollouts(steps) must be at least 1, got {steps}.")
        if self.vec.withholds:  # its environments go on only together, so a full fragment cannot wait for others
            if first_ready not in (None, 1):
                raise UserError(f"{self.vec.spec.name} resets one step late, so only first_ready=1 works with it.")
            first_ready = 1
        if first_ready is None:
            yield from self._in_step(steps)
        elif 1 <= first_ready <= self.vec.num_envs:
            yield from self._as_ready(steps, first_ready)
        else:
            raise UserError(f"first_ready must be between 1 and num_envs={self.vec.num_envs}, got {first_ready}.")

    def close(self) -> None:
        """Close the environments, unless they were handed in."""
        if self._owns_vec:
            self.vec.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _in_step(self, steps: int) -> Iterator[Trajectory]:
        vec = self.vec
        everyone = np.arange(vec.num_envs)
        halves = np.array_split(everyone, 2 if vec.pipelined and vec.num_envs > 1 else 1)
        columns, turn = self._start(steps)
        if self._in_flight.any():  # left over from a call that was given up
            self._begin(columns, vec.recv())
        while True:
            for ids in halves:
                self._decide(columns, ids)
            for t in range(steps):
                for ids in halves:
                    self._take_in(columns, vec.recv(env_ids=ids))
                    if t + 1 < steps:
                        self._decide(columns, ids)
            yield columns.take(everyone, self.version)
            self._require_turn(turn)

    def _as_ready(self, steps: int, count: int) -> Iterator[Trajectory]:
        columns, turn = self._start(steps)
        left_over = self._in_flight.copy()  # their next results were not decided for here
        idle = np.flatnonzero(~left_over)
        while True:
            if len(idle):
                self._decide(columns, idle)
            while len(full := columns.full()) < count:
                batch = self.vec.recv(min_ready=1)
                old = left_over[batch.env_ids]
                if old.any():
                    self._begin(columns, batch.take(np.flatnonzero(old)))
                    left_over[batch.env_ids] = False
                if not old.all():
                    self._take_in(columns, batch.take(np.flatnonzero(~old)) if old.any() else batch)
                more = columns.room(batch.env_ids)
                if len(more):
                    self._decide(columns, more)
            yield columns.take(full, self.version)
            self._require_turn(turn)
            idle = full

    def _start(self, steps: int) -> tuple[Columns, int]:
        """Columns that begin where the environments are, and the number of this call."""
        vec = self.vec
        if self._latest is None:
            batch = vec.recv()
            self._latest = ([leaf.copy() for leaf in vec.spec.observation.flatten(batch.obs)], batch.first.copy())
            state = to_numpy(self._policy.initial_state(vec.num_envs))
            self._state = None if state is None else tree_map(np.array, state)  # ours to write to
            self._check_state(self._state, vec.num_envs)
        columns = Columns(vec.spec, vec.num_envs, steps)
        columns.begin(np.arange(vec.num_envs), vec.spec.observation.unflatten(self._latest[0]), self._latest[1])
        self._turn += 1
        return columns, self._turn

    def _require_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise UserError("Another call of rollouts() has taken over these environments; go on with that one.")

    def _begin(self, columns: Columns, batch: StepBatch) -> None:
        """Let columns begin at results that belong to a call that was given up."""
        self._note(batch)
        columns.begin(batch.env_ids, batch.obs, batch.first)

    def _check_state(self, state: Tree, n: int) -> None:
        def check(leaf: Array) -> None:
            if leaf.ndim == 0 or leaf.shape[0] != n:
                raise UserError(
                    f"A policy's state must have a leading size of {n}, one per environment, got {leaf.shape}."
                )

        if state is not None:
            tree_map(check, state)

    def _decide(self, columns: Columns, ids: Array) -> None:
        assert self._latest is not None
        spec, (latest, first) = self.vec.spec, self._latest
        obs = spec.observation.unflatten([leaf[ids] for leaf in latest])
        state = tree_map(lambda leaf: leaf[ids], self._state) if self._state is not None else None
        action, state, extras = self._policy.act(obs, state, first[ids])
        if self._state is not None:
            new_state = to_numpy(state)
            self._check_state(new_state, len(ids))
            tree_map(lambda old, new: old.__setitem__(ids, new), self._state, new_state)
        leaves = spec.action.batch(action, len(ids))
        columns.act(ids, leaves, to_numpy(extras))
        self.vec.send(ids, spec.action.unflatten(leaves))
        self._in_flight[ids] = True

    def _take_in(self, columns: Columns, batch: StepBatch) -> None:
        columns.put(batch)
        self._note(batch)

    def _note(self, batch: StepBatch) -> None:
        assert self._latest is not None
        self._in_flight[batch.env_ids] = False
        self.episodes.add(batch)
        latest, first = self._latest
        for store, leaf in zip(latest, self.vec.spec.observation.flatten(batch.obs), strict=True):
            store[batch.env_ids] = leaf
        first[batch.env_ids] = batch.first
