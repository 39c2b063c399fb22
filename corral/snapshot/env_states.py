"""States of environments in this process, by number: one more environment steps from them, those that act never do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array, EnvSpec, Tree
from corral.snapshot.keeper import CannotSave, Env, EpisodeStart, StateKeeper
from corral.snapshot.keepers.choose import choose_keeping
from corral.snapshot.live_env import LiveEnv
from corral.snapshot.rng import GlobalRng, put_back
from corral.snapshot.states import Expansion, FailedSteps, Level, Rollouts, States, Views, turns

MakeScratch = Callable[[], Env]
_STATE_BYTES = 400  # beside what is kept and shown


@dataclass(slots=True)
class _State:
    """What is kept, by which maker, what it showed, and whether its episode is over."""

    kept: Any
    maker: _Maker
    obs: list[Array] | None  # None where nobody here has seen it
    over: bool
    nbytes: int


class _Maker:
    """One way to build environments: how their states are kept, and the one that steps from them."""

    def __init__(self, make: MakeScratch, name: str):
        self.scratch = make()
        try:
            self.keeping: StateKeeper = choose_keeping(self.scratch, replay=True)
        except BaseException:
            self.scratch.close()
            raise
        self._name = name
        self._at: Any = None  # the state that the scratch environment is in, exactly

    def enter(self, state: _State, seed: int | None) -> Env:
        """The scratch environment, in a state, with other dice if there is a seed."""
        if seed is not None or self._at is not state.kept:
            self._at = None
            try:
                self.keeping.put(self.scratch, state.kept)
            except CannotSave as error:
                raise UserError(
                    f"A search saves and restores environments, and {self._name} cannot be saved: {error}. Let it "
                    "draw from self.np_random alone, or give it state_dict() and load_state_dict(state)."
                ) from error
        self._at = None
        if seed is not None:
            self.keeping.reseed(self.scratch, seed)
        return self.scratch

    def keep(self) -> Any:
        """The state that the scratch environment is in."""
        self._at = self.keeping.keep(self.scratch)
        return self._at


class EnvStates(States):
    """States of some environments. `makers` build one like each; the same function twice, one scratch environment."""

    def __init__(
        self, spec: EnvSpec, acting: Sequence[LiveEnv], makers: Sequence[MakeScratch], memory_mb: float = 1024.0
    ):
        self.spec, self._acting = spec, acting
        made: dict[MakeScratch, _Maker] = {}
        self._common = GlobalRng(spec.name)
        try:
            with put_back():  # a reset may draw from them
                for make in makers:
                    if make not in made:
                        made[make] = _Maker(make, spec.name)
        except BaseException:
            for maker in made.values():
                maker.scratch.close()
            raise
        self._makers = [made[make] for make in makers]
        self.level = Level(min(maker.keeping.level for maker in self._makers))
        self.exact = all(maker.keeping.exact for maker in self._makers)
        self.stochastic = any(maker.keeping.throws_dice for maker in self._makers)
        if self.level == Level.REPLAY:
            for one in acting:
                one.record()
        self._states: dict[int, _State] = {}
        self._next, self._closed = 1, False
        self._most, self._memory_mb, self.nbytes = int(memory_mb * 1e6), memory_mb, 0
        self._mishaps = FailedSteps(spec.name)

    def __len__(self) -> int:
        return len(self._states)

    def new_ids(self, count: int) -> Array:
        """The next numbers."""
        self._next += count
        return np.arange(self._next - count, self._next)

    def save(self, env_ids: Array) -> Array:
        """Keep what these environments are in."""
        self._require_open()
        ids = self.new_ids(len(env_ids))
        for key, env_id in zip(ids.tolist(), env_ids.tolist(), strict=True):
            acting, maker = self._acting[env_id], self._makers[env_id]
            try:
                kept = maker.keeping.keep(acting.env, acting.beginning)
            except CannotSave as error:
                raise UserError(f"The state of {self.spec.name} cannot be saved: {error}.") from error
            self._add(key, kept, maker, acting.shown(), acting.over)
        return ids

    def load(self, ids: Array, env_ids: Array) -> Views:
        """Put these environments into these states."""
        for key, env_id in zip(ids.tolist(), env_ids.tolist(), strict=True):
            state, acting, maker = self._get(key), self._acting[env_id], self._makers[env_id]
            if maker is not state.maker:
                raise UserError(f"State {key} is of an environment that was built otherwise than environment {env_id}.")
            try:
                maker.keeping.put(acting.env, state.kept)
            except CannotSave as error:
                raise UserError(f"State {key} cannot be loaded into environment {env_id}: {error}.") from error
            maker.keeping.leave(acting.env)
            acting.loaded(state.obs, state.over, self._leading_to(state))
        if all(self._get(key).obs is None for key in ids.tolist()):
            return Views(None, None, turns(len(ids)))
        return self.look(ids)

    def look(self, ids: Array) -> Views:
        """What was shown there."""
        rows = [self._shown(key) for key in ids.tolist()]
        leaves = self.spec.observation.empty(len(rows))
        for i, row in enumerate(rows):
            for leaf, value in zip(leaves, row, strict=True):
                leaf[i] = value
        return Views(self.spec.observation.unflatten(leaves), None, turns(len(rows)))

    def drop(self, ids: Array) -> None:
        """Forget them."""
        for key in ids.tolist():
            state = self._states.pop(key, None)
            if state is not None:
                self.nbytes -= state.nbytes
                state.maker.keeping.drop(state.kept)

    def expand(self, parents: Array, actions: Tree, children: Array, seeds: Array | None = None) -> Expansion:
        """Step from each parent."""
        batch = len(parents)
        if not ((children > 0) & (children < self._next)).all():
            raise UserError(f"Not all of {children.tolist()} were given out: take what save and expand have given.")
        layout, out, origins = (
            self.spec.observation,
            _Out(self.spec, batch),
            [self._going_on(k) for k in parents.tolist()],
        )
        with self._common.spared():
            for i, (state, child, action) in enumerate(
                zip(origins, children.tolist(), self._actions(actions, batch), strict=True)
            ):
                env = state.maker.enter(state, None if seeds is None else int(seeds[i]))
                over = self._step(state, env, action, out, i)
                if out.failed[i]:
                    state.maker.enter(state, None)  # the step has left it nobody knows where
                self._add(child, state.maker.keep(), state.maker, out.row(i), over)
        faulty, obs = self._mishaps.note(out.failed, out.words), layout.unflatten(out.leaves)
        return Expansion(children, obs, out.reward, out.terminated, out.truncated, None, turns(batch), faulty)

    def rollout(self, parents: Array, actions: Tree, seeds: Array | None = None) -> Rollouts:
        """Step on from each parent."""
        batch, steps = len(parents), len(self.spec.action.flatten(actions)[0][0]) if len(parents) else 0
        rewards, length, out = np.zeros((batch, steps)), np.zeros(batch, np.int64), _Out(self.spec, batch)
        rows, origins = (
            self._actions(_joined(self.spec, actions), batch * steps),
            [self._going_on(k) for k in parents.tolist()],
        )
        with self._common.spared():
            for i, state in enumerate(origins):
                out.show(i, state.obs)
                env = state.maker.enter(state, None if seeds is None else int(seeds[i]))
                for t in range(steps):
                    over = self._step(state, env, rows[i * steps + t], out, i)
                    rewards[i, t], length[i] = out.reward[i], t + (not out.failed[i])
                    if over:
                        break
        faulty, obs = self._mishaps.note(out.failed, out.words), self.spec.observation.unflatten(out.leaves)
        return Rollouts(rewards, length, obs, out.terminated, out.truncated, faulty)

    def close(self) -> None:
        """Forget everything, and close the scratch environments."""
        if self._closed:
            return
        self._closed = True
        self.drop(np.array(list(self._states), np.int64))
        for maker in dict.fromkeys(self._makers):
            maker.scratch.close()
        for acting in self._acting:
            acting.release()

    def _get(self, key: int) -> _State:
        state = self._states.get(key)
        if state is None:
            self._require_open()
            raise UserError(f"There is no state {key}: it was dropped, or never saved.")
        return state

    def _require_open(self) -> None:
        if self._closed:
            raise UserError(f"The states of {self.spec.name} have been closed: make new Snapshots, or another Search.")

    def _going_on(self, key: int) -> _State:
        state = self._get(key)
        if state.over:
            raise UserError(f"State {key} is the end of an episode, from which there is no step.")
        return state

    def _shown(self, key: int) -> list[Array]:
        obs = self._get(key).obs
        if obs is None:
            raise UserError(
                f"What {self.spec.name} showed in state {key} is not known: nobody here has seen it reset or stepped. "
                "Pass its observation, or reset or step it."
            )
        return obs

    def _add(self, key: int, kept: Any, maker: _Maker, obs: list[Array] | None, over: bool) -> None:
        nbytes = maker.keeping.nbytes(kept) + sum(leaf.nbytes for leaf in obs or ()) + _STATE_BYTES
        if key in self._states:
            self.drop(np.array([key]))
        if self.nbytes + nbytes > self._most:
            maker.keeping.drop(kept)
            raise UserError(
                f"{len(self):,} states of {self.spec.name} take {self.nbytes / 1e6:,.1f} MB and there is no more room: "
                f"drop some, search less, or give them more than memory_mb={self._memory_mb:g}."
            )
        self._states[key] = _State(kept, maker, obs, over, nbytes)
        self.nbytes += nbytes

    def _actions(self, actions: Tree, count: int) -> list[Any]:
        """One for each row, checked, as environments take them; they may keep them."""
        layout = self.spec.action
        leaves = [list(leaf.copy()) for leaf in layout.batch(actions, count)]
        return leaves[0] if layout.single else [layout.unflatten(list(row)) for row in zip(*leaves, strict=True)]

    def _step(self, state: _State, env: Env, action: Any, out: _Out, i: int) -> bool:
        """Step from a state, and write row i; returns whether that ended the episode."""
        keeping = state.maker.keeping
        before = None if self.stochastic else keeping.dice(env)
        try:
            obs, reward, terminated, truncated, _ = keeping.step(env, action)
            out.write(i, obs, reward, terminated, truncated)
        except Exception as error:
            out.fail(i, state.obs, f"at action {action!r}: {error!r}")
            return True
        if before is not None:
            self.stochastic = keeping.dice(env) != before
        return bool(terminated or truncated)

    def _leading_to(self, state: _State) -> EpisodeStart | None:
        """What leads to a state that is kept as the way there."""
        if self.level != Level.REPLAY:
            return None

        def repeat(env: Env) -> Any:
            state.maker.keeping.put(env, state.kept)
            return None if state.obs is None else self.spec.observation.unflatten(state.obs)

        return EpisodeStart(repeat, state.nbytes)


class _Out:
    """Rows of what steps gave, which of them failed, and what was said of the last that did."""

    def __init__(self, spec: EnvSpec, batch: int):
        self._layout = spec.observation
        self.leaves = self._layout.empty(batch)
        self.reward, self.words = np.zeros(batch), ""
        self.terminated, self.truncated, self.failed = (np.zeros(batch, np.bool_) for _ in range(3))

    def write(self, i: int, obs: Any, reward: Any, terminated: Any, truncated: Any) -> None:
        """Row i; ValueError where it has something that is not finite."""
        for leaf, value in zip(self.leaves, self._layout.flatten(obs), strict=True):
            leaf[i] = value
            if leaf.dtype.kind == "f" and not np.isfinite(leaf[i]).all():
                raise ValueError("it showed what is not finite")
        self.reward[i] = reward if type(reward) is float else float(np.asarray(reward).reshape(()))
        if not math.isfinite(self.reward[i]):
            raise ValueError(f"its reward is {self.reward[i]}")
        self.terminated[i], self.truncated[i] = bool(terminated), bool(truncated)

    def show(self, i: int, obs: list[Array] | None) -> None:
        """Let row i show what was seen elsewhere, or nothing where nobody knows it."""
        for k, leaf in enumerate(self.leaves):
            leaf[i] = 0 if obs is None else obs[k]

    def fail(self, i: int, obs: list[Array] | None, words: str) -> None:
        """Let row i be a step that failed where this was seen."""
        self.show(i, obs)
        self.reward[i], self.terminated[i], self.truncated[i], self.failed[i] = 0.0, False, True, True
        self.words = words

    def row(self, i: int) -> list[Array]:
        """What row i shows."""
        return [leaf[i].copy() for leaf in self.leaves]


def _joined(spec: EnvSpec, actions: Tree) -> Tree:
    """Actions [B, T, ...] as [B * T, ...]."""
    leaves = [np.asarray(leaf) for leaf in spec.action.flatten(actions)]
    return spec.action.unflatten([leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves])
