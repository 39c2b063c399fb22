"""States of Python environments, by id: a scratch environment steps from them, and live ones are never stepped.

A planner in this process uses them as `States`, many rows at a time. A simulator (`corral serve`) uses the methods for
single states, which raise each error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array, EnvSpec, Tree
from corral.snapshot.keeper import CannotSave, Env, EpisodeStart, StateKeeper
from corral.snapshot.live_env import LiveEnv
from corral.snapshot.rng import GlobalRng, put_back
from corral.snapshot.scratch_env import KeptState, MakeEnv, ScratchEnv, StepRows
from corral.snapshot.states import (
    EpisodeEnded,
    Expansion,
    FailedSteps,
    Level,
    Rollouts,
    States,
    StatesFull,
    UnknownState,
    Views,
)

_STATE_BYTES = 400  # in addition to the keeper's state and the observation


class EnvStates(States):
    """States of live environments, identified by their index in `envs`.

    `makers` build one like each; environments with the same maker share a scratch environment. All states together take
    at most `memory_mb` and number at most `max_states`. `keeper` is for all environments; default: the best for each
    maker.
    """

    def __init__(
        self,
        spec: EnvSpec,
        envs: Sequence[LiveEnv],
        makers: Sequence[MakeEnv],
        memory_mb: float = 1024.0,
        *,
        max_states: int | None = None,
        keeper: StateKeeper | None = None,
    ):
        self.spec, self._envs = spec, envs
        made: dict[MakeEnv, ScratchEnv] = {}
        self._global_rng = GlobalRng(spec.name)
        try:
            with put_back():  # a reset may draw from the global RNGs
                for make in makers:
                    if make not in made:
                        made[make] = ScratchEnv(make, keeper)
        except BaseException:
            for scratch in made.values():
                scratch.close()
            raise
        self._scratch = [made[make] for make in makers]
        keepers = [scratch.keeper for scratch in made.values()]
        self.level = Level(min(one.level for one in keepers))
        self.exact = all(one.exact for one in keepers)
        self.stochastic = any(one.is_random for one in keepers)
        self.players = max(one.players for one in keepers)
        self.foreseen = next((one.foreseen for one in keepers if one.foreseen), "")
        if self.level == Level.REPLAY:
            for env in envs:
                env.record()
        self._states: dict[int, KeptState] = {}
        self._next_id, self._closed = 1, False
        self._max_bytes, self._memory_mb, self._max_states = round(memory_mb * 1e6), memory_mb, max_states
        self.nbytes = 0
        self._failed_steps = FailedSteps(spec.name)

    def __len__(self) -> int:
        return len(self._states)

    def new_ids(self, count: int) -> Array:
        self._next_id += count
        return np.arange(self._next_id - count, self._next_id)

    def save(self, env_ids: Array) -> Array:
        self._require_open()
        ids = self.new_ids(len(env_ids))
        for key, env_id in zip(ids.tolist(), env_ids.tolist(), strict=True):
            self._checked(self.save_env, key, env_id)
        return ids

    def load(self, ids: Array, env_ids: Array) -> Views:
        for key, env_id in zip(ids.tolist(), env_ids.tolist(), strict=True):
            state, live = self.get(key), self._envs[env_id]
            if self._scratch[env_id] is not state.scratch:
                raise UserError(f"State {key} is of an environment built differently from environment {env_id}.")
            try:
                self.load_into(live.env, state)
            except CannotSave as error:
                raise UserError(f"State {key} cannot be loaded into environment {env_id}: {error}.") from error
            live.on_load(state.obs, state.over, self._episode_start(state))
        if all(self.get(key).obs is None for key in ids.tolist()):
            return Views(None, None, np.zeros(len(ids), np.int8))
        return self.look(ids)

    def look(self, ids: Array) -> Views:
        out = StepRows(self.spec, len(ids))
        states = [self.get(key) for key in ids.tolist()]
        for i, state in enumerate(states):
            if state.obs is None:
                raise UserError(
                    f"The observation of {self.spec.name} in state {ids[i]} is not known, because the environment was "
                    "not reset or stepped since it was passed in: pass its last observation, or reset or step it."
                )
            out.show(i, state.obs)
        return Views(self.spec.observation.unflatten(out.leaves), *self._players_of(states))

    def drop(self, ids: Array) -> None:
        for key in ids.tolist():
            self._drop(key)

    def expand(self, parents: Array, actions: Tree, children: Array, seeds: Array | None = None) -> Expansion:
        batch = len(parents)
        if not ((children > 0) & (children < self._next_id)).all():
            raise UserError(f"Not all of {children.tolist()} are ids given by new_ids, save or expand.")
        out, origins = StepRows(self.spec, batch), [self.get_live(key) for key in parents.tolist()]
        made = []
        with self._global_rng.spared():
            for i, (state, child, action) in enumerate(
                zip(origins, children.tolist(), self._actions(actions, batch), strict=True)
            ):
                env = self._enter(state, None if seeds is None else int(seeds[i]))
                info = self._step(state, env, action, out, i)
                if out.failed[i]:
                    self._enter(state)  # the failed step left it in an unknown state
                made.append(self._save_child(child, state, out, i, info))
        faulty, obs = self._failed_steps.note(out.failed, out.message), self.spec.observation.unflatten(out.leaves)
        return Expansion(children, obs, out.reward, out.terminated, out.truncated, *self._players_of(made), faulty)

    def rollout(self, parents: Array, actions: Tree, seeds: Array | None = None) -> Rollouts:
        batch, steps = len(parents), len(self.spec.action.flatten(actions)[0][0]) if len(parents) else 0
        rewards, length, out = np.zeros((batch, steps)), np.zeros(batch, np.int64), StepRows(self.spec, batch)
        flat = [np.asarray(leaf).reshape(-1, *np.shape(leaf)[2:]) for leaf in self.spec.action.flatten(actions)]
        rows = self._actions(self.spec.action.unflatten(flat), batch * steps)
        origins = [self.get_live(key) for key in parents.tolist()]
        with self._global_rng.spared():
            for i, state in enumerate(origins):
                out.show(i, state.obs)
                env = self._enter(state, None if seeds is None else int(seeds[i]))
                for t in range(steps):
                    self._step(state, env, rows[i * steps + t], out, i)
                    rewards[i, t], length[i] = out.reward[i], t + (not out.failed[i])
                    if out.is_over(i):
                        break
        faulty, obs = self._failed_steps.note(out.failed, out.message), self.spec.observation.unflatten(out.leaves)
        return Rollouts(rewards, length, obs, out.terminated, out.truncated, faulty)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.drop_where(lambda key: True)
        for scratch in dict.fromkeys(self._scratch):
            scratch.close()
        for env in self._envs:
            env.release()

    # Single states, for simulators.

    def get(self, key: int) -> KeptState:
        state = self._states.get(key)
        if state is None:
            self._require_open()
            raise UnknownState(f"There is no state {key}: it was dropped or never saved.")
        return state

    def get_live(self, key: int) -> KeptState:
        state = self.get(key)
        if state.over:
            raise EpisodeEnded(f"State {key} is the end of an episode: no step from it is possible.")
        return state

    def save_env(self, key: int, env_id: int) -> KeptState:
        """Save the state of a live environment under this id; CannotSave or StatesFull if that fails."""
        live, scratch = self._envs[env_id], self._scratch[env_id]
        env = live.env
        kept = scratch.keeper.save(env, live.episode_start)
        state = KeptState(kept, scratch, live.last_obs(), live.over)
        if self.players > 1:
            base: Any = env.unwrapped
            obs, mask = base.view()
            state.obs = self.spec.observation.arrays(obs)
            state.turn, state.legal = base.to_play, mask.astype(np.bool_)
            state.over = not mask.any()
        return self.put(key, state)

    def load_into(self, env: Env, state: KeptState) -> None:
        """Load a state into an environment that its owner steps, or CannotSave."""
        state.scratch.keeper.load(env, state.kept)
        state.scratch.keeper.release(env)

    def save_scratch(self, key: int, state: KeptState, obs: list[Array], over: bool) -> KeptState:
        return self.put(key, KeptState(state.scratch.save(), state.scratch, obs, over))

    def put(self, key: int, state: KeptState) -> KeptState:
        """Store a state under this id, replacing an older one; StatesFull if there is no room."""
        keeper, seen = state.scratch.keeper, sum(leaf.nbytes for leaf in state.obs or ())
        state.nbytes = keeper.nbytes(state.kept) + seen + _STATE_BYTES
        old = self._states.get(key)
        spare = 0 if old is None else old.nbytes
        count = len(self) + (old is None)
        too_many = self._max_states is not None and count > self._max_states
        if self.nbytes - spare + state.nbytes > self._max_bytes or too_many:
            keeper.drop(state.kept)
            raise StatesFull(
                f"{len(self):,} states of {self.spec.name} take {self.nbytes / 1e6:,.1f} MB and there is no more room"
            )
        self._drop(key)
        self._states[key] = state
        self.nbytes += state.nbytes
        return state

    def put_exported(self, key: int, kept: Any, obs: list[Array], over: bool) -> None:
        """Store a state from elsewhere; CannotSave unless this environment can load it."""
        scratch, layout = self._scratch[0], self.spec.observation
        if not isinstance(kept, bytes) or self.level < Level.PORTABLE:
            raise CannotSave("this environment cannot import states")
        if [(leaf.dtype, leaf.shape) for leaf in obs] != [(leaf.dtype, leaf.shape) for leaf in layout.leaves]:
            raise CannotSave("its observation does not fit")
        state = KeptState(kept, scratch, obs, over)
        scratch.enter(state)
        self.put(key, state)

    def drop_where(self, wanted: Callable[[int], bool]) -> None:
        for key in [key for key in self._states if wanted(key)]:
            self._drop(key)

    def _drop(self, key: int) -> None:
        state = self._states.pop(key, None)
        if state is not None:
            self.nbytes -= state.nbytes
            state.scratch.keeper.drop(state.kept)

    def _enter(self, state: KeptState, seed: int | None = None) -> Env:
        try:
            return state.scratch.enter(state, seed)
        except CannotSave as error:
            raise UserError(
                f"Planning saves and restores environments, and {self.spec.name} cannot be saved: {error}. Draw random "
                "numbers only from self.np_random, or implement state_dict() and load_state_dict(state)."
            ) from error

    def _step(self, state: KeptState, env: Env, action: Any, out: StepRows, i: int) -> dict[str, Any]:
        """Step from a state into row i, and detect whether that drew random numbers; returns info."""
        keeper = state.scratch.keeper
        before = None if self.stochastic else keeper.rng_state(env)
        info = out.step(i, lambda: keeper.step(env, action), state.obs)
        if out.failed[i]:
            out.message = f"at action {action!r}: {out.errors[i]!r}"
        elif before is not None:
            self.stochastic = keeper.rng_state(env) != before
        return info

    def _save_child(self, key: int, parent: KeptState, out: StepRows, i: int, info: dict[str, Any]) -> KeptState:
        state = self._checked(self.save_scratch, key, parent, out.row(i), out.is_over(i))
        if self.players > 1:
            base: Any = parent.scratch.env.unwrapped
            state.turn, state.legal = parent.turn, np.zeros_like(parent.legal)
            if not out.failed[i]:
                state.turn, state.legal = base.to_play, np.asarray(info["action_mask"], np.bool_)
        return state

    def _players_of(self, states: list[KeptState]) -> tuple[Array | None, Array]:
        if self.players == 1 or not states:
            return None, np.zeros(len(states), np.int8)
        legal: Any = [state.legal for state in states]
        return np.stack(legal), np.array([state.turn for state in states], np.int8)

    def _actions(self, actions: Tree, count: int) -> list[Any]:
        layout = self.spec.action
        leaves = [list(leaf.copy()) for leaf in layout.batch(actions, count)]
        return leaves[0] if layout.single else [layout.unflatten(list(row)) for row in zip(*leaves, strict=True)]

    def _episode_start(self, state: KeptState) -> EpisodeStart | None:
        """How to reach a state that is kept as the actions that lead to it."""
        if self.level != Level.REPLAY:
            return None

        def repeat(env: Env) -> Any:
            state.scratch.keeper.load(env, state.kept)
            return None if state.obs is None else self.spec.observation.unflatten(state.obs)

        return EpisodeStart(repeat, state.nbytes)

    def _checked(self, save: Callable[..., KeptState], *args: Any) -> KeptState:
        """Call `save`, with errors for the users of a planner."""
        try:
            return save(*args)
        except CannotSave as error:
            raise UserError(f"The state of {self.spec.name} cannot be saved: {error}.") from error
        except StatesFull as error:
            remedy = f"drop some, search less, or give them more than memory_mb={self._memory_mb:g}"
            raise StatesFull(f"{error}: {remedy}.") from error

    def _require_open(self) -> None:
        if self._closed:
            raise UserError(f"The states of {self.spec.name} have been closed: make new Snapshots, or another Search.")
