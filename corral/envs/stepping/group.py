"""Environments that share one thread: step them, start their next episodes, rebuild them when they fail.

This is the hot loop of sampling. The local backend runs one group in this process, the process backend one per worker;
both write into `EnvRows`, so there is one implementation of a transition.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from corral.core import seeding
from corral.core.errors import EnvFailed, describe_error
from corral.core.gym_env import (
    EnvFactory,
    SharedEnv,
    build_env,
    claim,
    explained,
    release,
    require_same_spaces,
    seeded_reset,
)
from corral.core.types import Array, EnvSpec
from corral.envs.stepping.checks import RowChecks
from corral.envs.stepping.id_set import IdSet, IdSets
from corral.envs.stepping.recorder import Recorder
from corral.envs.stepping.rows import FAULTY, FIRST, MASKED, EnvRows
from corral.envs.supervision import IDLE, Fault, starting
from corral.snapshot.rng import State

Notify = Callable[[IdSet], None]

_REBUILD_TRIES = 10
# Results of cheap steps are announced together, slower ones one by one, so that `recv(min_ready)` gets them early.
_SLOW_STEP_S = 0.0005


class _Batch:
    __slots__ = ("ends", "lost", "raw_rewards", "rewards")

    def __init__(self) -> None:
        self.rewards: list[Any] = []
        self.raw_rewards: dict[int, float] = {}
        self.ends: list[tuple[int, bool, bool, bool]] = []  # env id, terminated, truncated, game over
        self.lost: list[int] = []


class EnvGroup:
    """Some of a VecEnv's environments, by env id."""

    rows: EnvRows

    def __init__(
        self,
        factories: Mapping[int, EnvFactory],
        name: str,
        report: Callable[[Fault], None],
        mark: MutableSequence[int],
        faults: tuple[type[BaseException], ...] = (Exception, SystemExit),
    ):
        """`faults` end an episode; where signals do not arrive, a KeyboardInterrupt is the environment's own too."""
        self.factories, self._name, self._report = dict(factories), name, report
        self._faults = faults
        self._mark = mark  # mark[0] is the environment being stepped, for the watchdog
        self.envs: dict[int, gymnasium.Env[Any, Any]] = {}
        self._steps: dict[int, Callable[[Any], Any]] = {}
        self._masked: set[int] = set()  # environments that show masks of their legal actions
        self._run_seed, self._role = 0, "train"
        self._slow = False
        self._lengths: dict[int, int] = {}  # lengths of the last episodes
        self.recorder: Recorder | None = None

    def build(self, built: Callable[[], None] = lambda: None) -> EnvSpec:
        """Build all environments; calls `built` after each."""
        specs = {}
        for env_id in self.factories:
            specs[env_id] = self._build(env_id)
            built()
        self._mark[0] = IDLE
        first_id, spec = next(iter(specs.items()))
        for env_id, other in specs.items():
            require_same_spaces(spec, first_id, other, env_id)
        return spec

    def attach(self, rows: EnvRows, sets: IdSets, mark: MutableSequence[int] | None = None) -> None:
        """Set the rows that results are written to, and optionally a mark that other processes can read."""
        self.rows, self._sets = rows, sets
        if mark is not None:
            mark[0] = IDLE
            self._mark = mark
        layout = rows.spec.observation
        self._obs_views: tuple[dict[int, list[Array]], ...] = tuple(
            {i: [leaf[half, i, ...] for leaf in rows.obs] for i in self.factories} for half in (0, 1)
        )
        self._final_views = {i: [leaf[i, ...] for leaf in rows.final] for i in self.factories}
        first = layout.leaves[0]
        row_views = tuple({i: views[0] for i, views in half.items()} for half in self._obs_views)
        self._simple = (row_views, first.shape, first.dtype if layout.single else None)
        self._checks = RowChecks(rows, self._name)

    def reset(self, ids: Array, run_seed: int, role: str, *, lenient: bool = False) -> None:
        """Start a seeded episode in each environment. A failing reset raises; with `lenient`, it counts as a fault."""
        self._run_seed, self._role = run_seed, role
        rows = self.rows
        for env_id in ids.tolist():
            seed = seeding.env_seed(run_seed, role, env_id, int(rows.episode[env_id]))
            if not lenient:
                self.begin((env_id,), (seed,), (None,))
                continue
            try:
                self.start(env_id, seed)
            except self._faults as error:
                self._report(rows.fault(env_id, "raised", "in reset():\n" + _trace(error)))
                self._rebuild(env_id, int(rows.episode[env_id]) + 1)
                self._first(env_id)
                self._mark[0] = IDLE

    def begin(
        self, ids: Iterable[int], seeds: Iterable[int | None], options: Iterable[Mapping[str, Any] | None]
    ) -> None:
        """Start an episode in each environment, with its own seed and options; EnvNotStarted if one raises."""
        for env_id, seed, its_options in zip(ids, seeds, options, strict=True):
            with explained(f"{self._name} cannot be reset"):
                self.start(env_id, seed, its_options)

    def start(self, env_id: int, seed: int | None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode; without a seed, the environment's own RNG continues."""
        rows = self.rows
        if env_id not in self.envs:
            require_same_spaces(rows.spec, env_id, self._build(env_id), env_id)
        self._mark[0] = starting(env_id)
        rows.step[env_id] = 0
        if seed is not None:
            rows.seed[env_id] = seed
        if rows.infos is not None:
            rows.infos.forget(env_id)
        obs = self._reset(env_id, seed, options)
        self._checks.require_good_reset(obs, env_id)
        self._put(rows.last_obs(env_id), obs, env_id)
        self._first(env_id)
        self._mark[0] = IDLE

    def _first(self, env_id: int) -> None:
        rows = self.rows
        rows.reward[env_id] = rows.raw_reward[env_id] = 0.0
        rows.flags[env_id] = False
        rows.flags[env_id, [FIRST, MASKED]] = True, env_id in self._masked

    def replace(self, env_id: int, env: gymnasium.Env[Any, Any], obs: list[Array]) -> None:
        """Use this environment, whose episode is at `obs`. How to repeat that is unknown until the next one."""
        if self.envs.get(env_id, env) is not env:
            _close(self.envs[env_id])
        self._own(env_id, env)
        for view, value in zip(self.rows.last_obs(env_id), obs, strict=True):
            view[...] = value
        if self.recorder is not None:
            self.recorder.forget(env_id)

    def step(self, chosen: IdSet, notify: Notify) -> None:
        """Step each environment with its row's action; call `notify` as results become complete."""
        rows, mark, steps = self.rows, self._mark, self._steps
        row_views, shape, dtype = self._simple  # the common case, one array, is written without a call
        phases = rows.phase[chosen.index].tolist()
        # Usually all rows write to the same half, which then need not be looked up again.
        half = phases[0] if phases.count(phases[0]) == len(phases) else None
        start, batch = time.perf_counter(), _Batch()
        rewards = batch.rewards
        one_by_one, keeps_infos = self._slow, rows.infos is not None
        if self.recorder is not None:
            self.recorder.acted(chosen)
        for env_id, phase, action in zip(chosen.numbers, phases, rows.actions(chosen), strict=True):
            mark[0] = env_id
            try:
                obs, reward, terminated, truncated, info = steps[env_id](action)
            except self._faults as error:
                self._checks.require_step_tuple(error, env_id)
                self._report(rows.fault(env_id, "raised", _trace(error), later=1))
                self._rebuild(env_id, int(rows.episode[env_id]) + 1)
                batch.lost.append(env_id)
                rewards.append(0.0)
            else:
                if type(reward) is np.ndarray:  # read now: the environment may reuse it
                    reward = self._checks.scalar(reward, env_id)
                rewards.append(reward)
                life_lost = self._read_info(env_id, info or {}, batch) if info or keeps_infos else False
                if terminated or truncated:
                    flags = self._checks.flags(terminated, truncated, env_id)
                    batch.ends.append((env_id, *flags, not life_lost))
                    self._put(self._final_views[env_id], obs, env_id)
                    self._next_episode(env_id, phase, life_lost=life_lost)
                elif type(obs) is np.ndarray and obs.dtype is dtype and obs.shape == shape:
                    row_views[phase][env_id][...] = obs
                else:
                    self._put(self._obs_views[phase][env_id], obs, env_id)
            if one_by_one:
                self._finish(self._sets.of_mask(1 << env_id), phase, batch, notify)
                batch = _Batch()
                rewards = batch.rewards
        if not one_by_one:
            self._finish(chosen, half, batch, notify)
        mark[0] = IDLE
        self._slow = time.perf_counter() - start > _SLOW_STEP_S * len(phases)

    def _read_info(self, env_id: int, info: Any, batch: _Batch) -> bool:
        """Keep what a step's info says; returns whether a life was lost."""
        raw_reward, life_lost = self._checks.read_info(info, env_id)
        if raw_reward is not None:
            batch.raw_rewards[env_id] = raw_reward
        if self.rows.infos is not None:
            self.rows.infos.stepped(env_id, info)
        return life_lost

    def record(self) -> Recorder:
        if self.recorder is None:
            self.recorder = Recorder(self.rows)
        return self.recorder

    def save(self) -> dict[str, State]:
        """What restores each environment, by id; those that cannot be restored are missing."""
        if self.recorder is None:
            return {}
        saved = {str(env_id): self.recorder.save(env_id, env) for env_id, env in self.envs.items()}
        return {env_id: state for env_id, state in saved.items() if state is not None}

    def load(self, saved: Mapping[str, State], run_seed: int, role: str, alive: Callable[[], None]) -> list[int]:
        """Restore environments from `save()`; returns the ids that start a new episode because restoring failed. The
        rows hold the saved observations, seeds and counters. `alive` is called repeatedly.
        """
        self._run_seed, self._role = run_seed, role
        rows, recorder, restarted = self.rows, self.record(), []
        for env_id in self.factories:
            self._mark[0] = starting(env_id)
            if not recorder.restore(env_id, self.envs[env_id], saved.get(str(env_id)), alive):
                rows.episode[env_id] += 1
                rows.step[env_id] = 0
                self._first(env_id)
                self._rebuild(env_id, int(rows.episode[env_id]))
                restarted.append(env_id)
        self._mark[0] = IDLE
        return restarted

    def close(self) -> None:
        for env in self.envs.values():
            _close(env)
        self.envs.clear()
        self._steps.clear()  # bound methods, which would keep the environments alive

    def _finish(self, chosen: IdSet, half: int | None, batch: _Batch, notify: Notify) -> None:
        """Write the results of the whole batch, check their values, and announce them."""
        rows, rewards, index = self.rows, batch.rewards, chosen.index
        try:
            good = math.isfinite(sum(rewards))
            values = np.array(rewards, np.float64)
        except (TypeError, ValueError, OverflowError):  # not all of them are plain numbers
            rewards = [self._checks.scalar(r, i) for r, i in zip(rewards, chosen.numbers, strict=True)]
            values = np.array(rewards, np.float64)
            good = math.isfinite(sum(rewards))
        rows.reward[index] = values
        rows.raw_reward[index] = values
        rows.no_flags(index)
        for env_id, raw in batch.raw_rewards.items():
            rows.raw_reward[env_id] = raw
            good = good and math.isfinite(raw)
        rows.step[index] += 1
        for env_id, terminated, truncated, game_over in batch.ends:
            self._lengths[env_id] = int(rows.step[env_id])
            rows.flags[env_id, :5] = (terminated, truncated, False, True, game_over)
            rows.step[env_id] = 0
            rows.episode[env_id] += 1
        for env_id in batch.lost:
            self._write_faulty_row(env_id)
        ended = [end[0] for end in batch.ends]
        if not (good and self._checks.current(chosen, half) and (not ended or self._checks.finals(ended))):
            self._find_bad(chosen.numbers)
        notify(chosen)

    def _find_bad(self, ids: Iterable[int]) -> None:
        rows = self.rows
        for env_id in ids:
            ended = bool(rows.flags[env_id, FIRST])
            views = rows.last_obs(env_id)
            next_bad = not self._checks.obs(env_id)
            rewards = rows.reward[env_id], rows.raw_reward[env_id]
            step_bad = not np.isfinite(rewards).all() or (ended and not self._checks.finals([env_id]))
            if rows.flags[env_id, FAULTY] or not (next_bad or step_bad):
                continue
            if not ended:
                self._report(rows.fault(env_id, *self._checks.describe("its step", views, rewards[0])))
                self._rebuild(env_id, int(rows.episode[env_id]) + 1)
                self._write_faulty_row(env_id)
                continue
            # The episode is over and counted: separate faults of its last step from those of the reset.
            if step_bad:
                found = self._checks.describe("its last step", self._final_views[env_id], rewards[0])
                fault = rows.fault(env_id, *found)
                self._report(replace(fault, episode=fault.episode - 1, step=self._lengths[env_id]))
                self._write_faulty_row(env_id, episode_over=False)
            else:
                self._report(rows.fault(env_id, *self._checks.describe("its reset", views)))
            self._rebuild(env_id, int(rows.episode[env_id]))

    def _write_faulty_row(self, env_id: int, *, episode_over: bool = True) -> None:
        self.rows.mark_lost(env_id)
        self.rows.step[env_id] = 0
        self.rows.episode[env_id] += int(episode_over)

    def _put(self, views: list[Array], obs: Any, env_id: int) -> None:
        """Copy an observation into its row, refusing values that would be broadcast or wrapped around."""
        if type(obs) is np.ndarray and obs.dtype is self._simple[2] and obs.shape == self._simple[1]:
            views[0][...] = obs
            return
        for view, value in zip(views, self._checks.leaves(obs, env_id), strict=True):
            view[...] = value

    def _reset(self, env_id: int, seed: int | None, options: Mapping[str, Any] | None = None) -> Any:
        env, recorder = self.envs[env_id], self.recorder
        if recorder is not None and seed is not None:
            recorder.seeded(env_id, env, seed)
        elif recorder is not None:
            recorder.next_game(env_id, env)
        obs, info = seeded_reset(env, seed, options)
        if isinstance(info, Mapping) and "action_mask" in info:
            self._masked.add(env_id)
        if self.rows.infos is not None:
            self.rows.infos.began(env_id, info)
        return obs

    def _next_episode(self, env_id: int, phase: int, *, life_lost: bool) -> None:
        if self.recorder is not None and not life_lost:
            self.recorder.next_game(env_id, self.envs[env_id])
        self._mark[0] = starting(env_id)
        try:
            obs, info = self.envs[env_id].reset()
        except self._faults as error:
            self._report(self.rows.fault(env_id, "raised", "in reset():\n" + _trace(error)))
            self._rebuild(env_id, int(self.rows.episode[env_id]) + 1)
        else:
            self._put(self._obs_views[phase][env_id], obs, env_id)
            if self.rows.infos is not None:
                self.rows.infos.began(env_id, info)

    def _build(self, env_id: int) -> EnvSpec:
        self._mark[0] = starting(env_id)
        env, spec = build_env(self.factories[env_id], self._name)
        self._own(env_id, env)
        return spec

    def _own(self, env_id: int, env: gymnasium.Env[Any, Any]) -> None:
        claim(env, self)
        self.envs[env_id], self._steps[env_id] = env, env.step

    def _rebuild(self, env_id: int, episode: int) -> None:
        """Replace a failed environment and store `episode`'s first observation; EnvFailed after several attempts. The
        factory may return the failed object again, which is reset, but not another row's.
        """
        rows = self.rows
        for attempt in range(_REBUILD_TRIES):
            if env_id in self.envs:
                _close(self.envs.pop(env_id))
            try:
                spec = self._build(env_id)
                require_same_spaces(rows.spec, env_id, spec, env_id)
                seed = seeding.env_seed(self._run_seed, self._role, env_id, episode, attempt)
                obs = self._reset(env_id, seed)
                self._put(rows.last_obs(env_id), obs, env_id)
                if not self._checks.obs(env_id):
                    raise ValueError(self._checks.describe("the reset after the restart", rows.last_obs(env_id))[1])
                rows.seed[env_id] = seed
                return
            except SharedEnv:
                raise
            except self._faults as error:
                last = describe_error(error)
                time.sleep(min(1.0, 0.05 * 2**attempt))
        raise EnvFailed(
            f"Environment {env_id} ({self._name}) could not be restarted in {_REBUILD_TRIES} attempts, the last time "
            f"because of {last}; `corral check-env` shows what is wrong with it."
        )


def _close(env: gymnasium.Env[Any, Any]) -> None:
    release(env)
    with contextlib.suppress(Exception):  # a broken environment may fail to close
        env.close()


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
