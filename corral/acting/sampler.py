"""Sampling with a user's policy: `Sampler(env, policy).rollouts(steps)` yields plain arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from corral.acting.episode_stats import EpisodeStats
from corral.acting.policy import ActContext, ContextPolicy, Policy, as_policy, bind_envs, to_numpy
from corral.acting.rollout_buffer import Envs, RolloutBuffer, Time
from corral.core.errors import UserError
from corral.core.types import Array, StepBatch, Trajectory, Tree, tree_map
from corral.envs.make import make_vec
from corral.envs.resolve import EnvLike
from corral.envs.vec_env import VecEnv


class Sampler:
    """Runs a policy in many environments.

    The policy is a function of a batch of observations, or a `Policy` with state. It is called with the environments
    that are ready, so the batch size varies between calls and the policy must not assume it.

    On the process backend the environments act in two halves: one half steps while the policy computes actions for the
    other. The halves do not depend on the number of workers, so neither do the trajectories.
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
        bind_envs(self._policy, self.vec)
        self.episodes = EpisodeStats(self.vec.num_envs)
        self._version = 0
        # Checked once: isinstance() with a Protocol takes longer than a CartPole step.
        self._context_policy = self._policy if isinstance(self._policy, ContextPolicy) else None
        self._latest: tuple[list[Array], Array] | None = None  # observations and `first` flags, per environment
        # Rows of a buffer that are newer than `_latest`, by their first environment: copied when they are read, which
        # is once per trajectory and not once per step.
        self._newer: dict[int, tuple[RolloutBuffer, int, slice]] = {}
        self._state: Tree = None
        self._in_flight = np.zeros(self.vec.num_envs, np.bool_)
        self._last_act_s = 0.0
        self._call_id = 0

    def set_context(self, ctx: ActContext) -> None:
        """Pass the context to the policy; trajectories that begin from now on carry `ctx.version`."""
        self._version = ctx.version
        if self._context_policy is not None:
            self._context_policy.set_context(ctx)

    def rollouts(
        self, steps: int = 128, *, first_ready: int | None = None, linger_s: float = 0.0
    ) -> Iterator[Trajectory]:
        """Yield trajectories of `steps` steps forever: consecutive fragments, which episodes may span.

        Every trajectory has all environments, in order. With `first_ready=k` it has the first environments, at least
        `k`, that filled their fragment, so that slow ones do not delay the others; `env_id` identifies them. The policy
        then waits up to `linger_s`, or the duration of its last call if that is longer, for half of the environments
        before it acts for those that are ready: larger batches cost less per environment. The policy may be changed
        between two trajectories. A new call drops the unfinished fragments of the previous one.
        """
        if steps < 1:
            raise UserError(f"rollouts(steps) must be at least 1, got {steps}.")
        if (
            self.vec.holds_back_rows
        ):  # its environments advance only together, so a full fragment cannot wait for others
            if first_ready not in (None, 1):
                raise UserError(f"{self.vec.spec.name} uses next-step autoreset, so first_ready must be 1.")
            first_ready = 1
        if first_ready is None:
            yield from self._in_step(steps)
        elif 1 <= first_ready <= self.vec.num_envs:
            yield from self._as_ready(steps, first_ready, linger_s)
        else:
            raise UserError(f"first_ready must be between 1 and num_envs={self.vec.num_envs}, got {first_ready}.")

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next trajectory depends on, except the policy's weights and RNGs.

        Call it between two trajectories of `rollouts()`, and `vec.record_episodes()` before the first.
        """
        leaves, first = self._prepare()
        return {
            "obs": {str(k): leaf.copy() for k, leaf in enumerate(leaves)},
            "first": first.copy(),
            "policy": {str(k): leaf.copy() for k, leaf in enumerate(_leaves(self._state))},
            "episodes": self.episodes.state_dict(),
            "version": self._version,
            "vec": self.vec.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Resume in a new Sampler from `state_dict`; returns the environments that start a new episode.

        The interrupted episodes are dropped, not counted.
        """
        if self._latest is not None:
            raise UserError("load_state_dict() needs a Sampler that has not sampled yet: make a new one.")
        vec = self.vec
        self._state = self._initial_state()
        held = _leaves(self._state)
        if [leaf.shape for leaf in held] != [leaf.shape for leaf in state["policy"].values()]:
            raise UserError("This state does not fit this policy; load it with the policy that it was saved with.")
        restarted = vec.load_state_dict(state["vec"])
        self._latest = [state["obs"][str(k)].copy() for k in range(len(state["obs"]))], state["first"].copy()
        for k, leaf in enumerate(held):
            leaf[...] = state["policy"][str(k)]
        self.episodes.load_state_dict(state["episodes"])
        self._version = state["version"]
        if restarted:
            self.episodes.drop(restarted)
            batch = vec.recv(env_ids=np.array(restarted))
            self._store_latest(batch.env_ids, vec.spec.observation.flatten(batch.obs), batch.first)
        return restarted

    def close(self) -> None:
        if self._owns_vec:
            self.vec.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _in_step(self, steps: int) -> Iterator[Trajectory]:
        vec, flatten = self.vec, self.vec.spec.observation.flatten
        columns, call_id = self._start(steps)
        if self._in_flight.any():  # from an abandoned call
            self._begin(columns, vec.recv())
        count = 2 if vec.pipelined and vec.num_envs > 1 else 1
        halves = [_EnvSubset(ids) for ids in np.array_split(np.arange(vec.num_envs), count)]
        all_envs = _EnvSubset(np.arange(vec.num_envs))
        while True:
            for half in halves:
                leaves, first = columns.seen(0, half.envs)
                obs = vec.spec.observation.unflatten([leaf.copy() for leaf in leaves])
                self._act(columns, 0, half.envs, half.ids, obs, first.copy())
            for t in range(steps):
                for half in halves:
                    batch = vec.recv(env_ids=half.ids)
                    half.ids = batch.env_ids
                    columns.put(t, half.envs, flatten(batch.obs), batch)
                    self._count_results(half.envs, batch)
                    self._newer[half.envs.start] = columns, t + 1, half.envs
                    if t + 1 < steps:
                        self._act(columns, t + 1, half.envs, half.ids, batch.obs, batch.first)
            yield columns.take(all_envs.envs, all_envs.ids, self._version)
            self._require_current_call(call_id)

    def _as_ready(self, steps: int, count: int, linger_s: float) -> Iterator[Trajectory]:
        columns, call_id = self._start(steps)
        cursor = np.zeros(self.vec.num_envs, np.int64)  # number of steps in each column
        started = np.full(self.vec.num_envs, self._version)  # a slow environment's column may span several versions
        left_over = self._in_flight.copy()  # their next results belong to actions of an earlier call
        idle = np.flatnonzero(~left_over)
        while True:
            if len(idle):
                self._act(columns, cursor[idle], idle, idle, *self._seen(idle))
            while len(full := np.flatnonzero(cursor == steps)) < count:
                if linger_s:
                    self.vec.linger(int(np.count_nonzero(self._in_flight)) // 2, max(linger_s, self._last_act_s))
                batch = self.vec.recv(min_ready=1)
                ids = batch.env_ids
                old = left_over[ids]
                if old.any():
                    self._begin(columns, batch.take(np.flatnonzero(old)))
                    left_over[ids] = False
                if not old.all():
                    fresh = batch.take(np.flatnonzero(~old)) if old.any() else batch
                    obs = self.vec.spec.observation.flatten(fresh.obs)
                    columns.put(cursor[fresh.env_ids], fresh.env_ids, obs, fresh)
                    self._record_results(fresh.env_ids, obs, fresh)
                    cursor[fresh.env_ids] += 1
                more = ids[cursor[ids] < steps]
                if len(more):
                    self._act(columns, cursor[more], more, more, *self._seen(more))
            yield columns.take(full, full, started[full])
            self._require_current_call(call_id)
            cursor[full], started[full] = 0, self._version
            idle = full

    def _start(self, steps: int) -> tuple[RolloutBuffer, int]:
        """A new rollout buffer that starts at the latest observations, and the id of this call."""
        vec = self.vec
        latest = self._prepare()
        columns = RolloutBuffer(vec.spec, vec.num_envs, steps)
        columns.begin(slice(None), *latest)
        self._call_id += 1
        return columns, self._call_id

    def _prepare(self) -> tuple[list[Array], Array]:
        if self._latest is None:
            batch = self.vec.recv()
            self._state = self._initial_state()
            self._latest = [leaf.copy() for leaf in self.vec.spec.observation.flatten(batch.obs)], batch.first.copy()
        return self._update_latest()

    def _update_latest(self) -> tuple[list[Array], Array]:
        for columns, t, envs in self._newer.values():
            self._store_latest(envs, *columns.seen(t, envs))
        self._newer.clear()
        assert self._latest is not None
        return self._latest

    def _initial_state(self) -> Tree:
        state = to_numpy(self._policy.initial_state(self.vec.num_envs))
        self._check_state(state, self.vec.num_envs)
        return None if state is None else tree_map(np.array, state)  # writable

    def _require_current_call(self, call_id: int) -> None:
        if call_id != self._call_id:
            raise UserError("A later call of rollouts() now uses these environments; continue with its iterator.")

    def _begin(self, columns: RolloutBuffer, batch: StepBatch) -> None:
        """Begin columns at results that belong to an abandoned call."""
        obs = self.vec.spec.observation.flatten(batch.obs)
        self._record_results(batch.env_ids, obs, batch)
        columns.begin(batch.env_ids, obs, batch.first)

    def _check_state(self, state: Tree, n: int) -> None:
        def check(leaf: Array) -> None:
            if leaf.ndim == 0 or leaf.shape[0] != n:
                raise UserError(
                    f"A policy's state must have a leading size of {n}, one per environment, got {leaf.shape}."
                )

        if state is not None:
            tree_map(check, state)

    def _seen(self, envs: Array) -> tuple[Tree, Array]:
        """Copies of the latest observations of these environments, and of their `first` flags."""
        leaves, first = self._update_latest()
        return self.vec.spec.observation.unflatten([leaf[envs].copy() for leaf in leaves]), first[envs].copy()

    def _act(self, columns: RolloutBuffer, t: Time, envs: Envs, ids: Array, obs: Tree, first: Array) -> None:
        """Call the policy with copies, and send its actions, which the VecEnv checks."""
        state = None if self._state is None else tree_map(lambda leaf: leaf[envs].copy(), self._state)
        began = time.perf_counter()
        action, state, extras = self._policy.act(obs, state, first)
        self._last_act_s = time.perf_counter() - began
        if self._state is not None:
            state = to_numpy(state)
            self._check_state(state, len(ids))
            tree_map(lambda old, new: old.__setitem__(envs, new), self._state, state)
        if type(action) is not np.ndarray:
            action = to_numpy(action)
        self.vec.send(ids, action)
        self._in_flight[envs] = True
        columns.act(t, envs, self.vec.spec.action.flatten(action), extras)

    def _record_results(self, envs: Envs, obs: list[Array], batch: StepBatch) -> None:
        self._count_results(envs, batch)
        self._store_latest(envs, obs, batch.first)

    def _count_results(self, envs: Envs, batch: StepBatch) -> None:
        self._in_flight[envs] = False
        self.episodes.add(batch, envs)

    def _store_latest(self, envs: Envs, obs: list[Array], first: Array) -> None:
        assert self._latest is not None
        latest, firsts = self._latest
        for store, leaf in zip(latest, obs, strict=True):
            store[envs] = leaf
        firsts[envs] = first


class _EnvSubset:
    """Consecutive environments that act together."""

    def __init__(self, ids: Array):
        self.envs = slice(int(ids[0]), int(ids[-1]) + 1)
        self.ids = ids  # later the VecEnv's own array, which it recognises when it is passed back


def _leaves(tree: Tree) -> list[Array]:
    found: list[Array] = []
    if tree is not None:
        tree_map(found.append, tree)
    return found
