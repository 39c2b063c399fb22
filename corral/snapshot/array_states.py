"""States of environments with vectorized dynamics (arrays of rows): saved by copying, stepped in one call.

An environment supports this by offering its model, and its current row:

```python
class Walk(gymnasium.Env):
    rows = WalkModel()  # an ArrayModel

    @property
    def row(self) -> np.ndarray: ...

    @row.setter
    def row(self, row): ...
```
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from corral.core.errors import UserError
from corral.core.gym_env import Env, PassiveWrapper, layers
from corral.core.jit import compiled
from corral.core.spaces import Leaf
from corral.core.types import Array, EnvSpec, Tree, tree_map
from corral.snapshot.keepers.declared import time_limits
from corral.snapshot.live_env import LiveEnv
from corral.snapshot.states import Expansion, FailedSteps, Level, Rollouts, States, Views

FREE, EMPTY, LOST = -3, -2, -1  # sentinel values of `home`: unused id, id without a state, state lost
_FIRST_ROWS = 1024
_INDEX_BYTES = 16  # of an id, in addition to its observation
_NOT_FINITE = "it returned an observation or a reward that is not finite"
_TRANSPARENT = (TimeLimit, OrderEnforcing, PassiveEnvChecker, PassiveWrapper)


@runtime_checkable
class ArrayModel(Protocol):
    """The dynamics of an environment as functions of many states at once, rows [n, width] of float64. Optional
    attributes: `dtype` of the rows; `players = 2` for a game in which two players move in turn, whose `look` also
    returns the legal moves [n, actions]; `finite = True` if rewards and observations need no check.
    """

    @property
    def width(self) -> int:
        """Numbers in a row."""

    @property
    def stochastic(self) -> bool:
        """Whether steps are random. They then depend on `seeds`, one for each row; without seeds, on the row alone."""

    def look(self, rows: Array) -> Any:
        """Observations [n, ...]."""

    def step(self, rows: Array, actions: Tree, seeds: Array | None) -> tuple[Array, Array, Array]:
        """Step rows in place; returns rewards, terminated and truncated, [n] each."""


def has_rows(env: Env) -> bool:
    """Whether an environment offers an ArrayModel, and has no wrappers but time limits and checks."""
    *wrappers, base = layers(env)
    return isinstance(getattr(base, "rows", None), ArrayModel) and all(isinstance(w, _TRANSPARENT) for w in wrappers)


class StateIndex:
    """Ids of states with their home (place in the store), player to move and observation. An id is a row of these
    arrays. They grow up to `memory_mb`, in which each state takes `row_bytes` elsewhere; released ids are reused.
    """

    def __init__(self, leaves: Sequence[Leaf], memory_mb: float, name: str, row_bytes: int = 0):
        self._name = name
        seen = sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in leaves)
        self._max_rows = int(memory_mb * 1e6) // (_INDEX_BYTES + seen + row_bytes)
        self.home = np.zeros(0, np.int16)
        self.turn = np.zeros(0, np.int8)
        self.obs = [np.zeros((0, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._free = np.zeros(0, np.int64)  # the first `_num_free` are valid
        self._num_free = 0
        self._grow(min(_FIRST_ROWS, self._max_rows))

    def new_ids(self, count: int) -> Array:
        """Unused ids; UserError when the memory is full."""
        if count > self._num_free:
            needed = len(self.home) + count
            self._grow(max(needed, min(2 * needed, self._max_rows)))
        self._num_free -= count
        ids = self._free[self._num_free : self._num_free + count].copy()
        self.home[ids] = EMPTY
        return ids

    def homes_of(self, ids: Array) -> Array:
        """Homes of these states, or LOST; UserError for ids without a state."""
        return self._require(ids, EMPTY)

    def require_given(self, ids: Array) -> None:
        self._require(ids, FREE)

    def put(self, ids: Array, turn: Array, obs: Sequence[Array]) -> None:
        self.turn[ids] = turn
        for leaf, value in zip(self.obs, obs, strict=True):
            leaf[ids] = value

    def release(self, ids: Array) -> tuple[Array, Array]:
        """Free those ids that are in use; returns them, and their homes."""
        homes, before = np.empty(len(ids), np.int16), self._num_free
        self._num_free = free_ids(self.home, ids, self._free, before, homes)
        return self._free[before : self._num_free].copy(), homes[: self._num_free - before]

    def _require(self, ids: Array, more_than: int) -> Array:
        homes = np.empty(len(ids), np.int16)
        bad = find_homes(self.home, ids, more_than, homes)
        if bad >= 0:
            raise UserError(f"State {ids[bad]} was dropped or never saved: pass ids returned by save() or expand().")
        return homes

    def _grow(self, rows: int) -> None:
        old = len(self.home)
        if rows > self._max_rows:
            raise UserError(
                f"A search of {self._name} keeps {old - 1 - self._num_free:,} states and has memory for "
                f"{self._max_rows:,}: use fewer simulations or trees, or give it more memory_mb."
            )
        self.home, self.turn = _longer(self.home, rows), _longer(self.turn, rows)
        self.obs = [_longer(leaf, rows) for leaf in self.obs]
        self.home[old:] = FREE
        free = np.arange(rows - 1, max(old, 1) - 1, -1)  # id 0 is never given out
        self._free = _longer(self._free, rows)
        self._free[self._num_free : self._num_free + len(free)] = free
        self._num_free += len(free)


@compiled
def free_ids(home: Array, ids: Array, free: Array, num_free: int, homes: Array) -> int:
    """Append ids that are in use to the free ones, once each; returns how many are free then."""
    before = num_free
    for key in ids:
        if 0 < key < len(home) and home[key] != FREE:
            homes[num_free - before], home[key], free[num_free] = home[key], FREE, key
            num_free += 1
    return num_free


@compiled
def find_homes(home: Array, ids: Array, more_than: int, homes: Array) -> int:
    """Write the homes of ids; returns the index of the first id without one, or -1."""
    for i in range(len(ids)):
        if not 0 < ids[i] < len(home) or home[ids[i]] <= more_than:
            return i
        homes[i] = home[ids[i]]
    return -1


def _longer(array: Array, rows: int) -> Array:
    grown = np.zeros((rows, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


class ArrayStates(States):
    """States of environments in this process as rows of one array; without environments, rows are given to `put`."""

    level = Level.MEMORY

    def __init__(self, model: ArrayModel, spec: EnvSpec, envs: Sequence[LiveEnv] = (), memory_mb: float = 1024.0):
        self.model, self.spec, self._envs = model, spec, envs
        self.stochastic, self.players = model.stochastic, getattr(model, "players", 1)
        self._finite = bool(getattr(model, "finite", False))
        limits = [limit._max_episode_steps for env in envs[:1] for limit in time_limits(env.env)]
        self._limit: int | None = min(limits, default=None)
        self.rows = np.zeros((0, model.width), getattr(model, "dtype", np.float64))
        self._over, self._elapsed = np.zeros(0, np.bool_), np.zeros(0, np.int64)
        row_bytes = self.rows.itemsize * model.width + 9
        self._index = StateIndex((), memory_mb, spec.name, row_bytes)
        self._failed_steps = FailedSteps(spec.name)

    def new_ids(self, count: int) -> Array:
        ids, size = self._index.new_ids(count), len(self._index.home)
        if len(self.rows) < size:
            self.rows, self._over = _longer(self.rows, size), _longer(self._over, size)
            self._elapsed = _longer(self._elapsed, size)
        return ids

    def put(self, rows: Array, to_play: Array | int = 0) -> Array:
        ids = self.new_ids(len(rows))
        self.rows[ids], self._index.turn[ids], self._over[ids], self._elapsed[ids] = rows, to_play, False, 0
        return ids

    def save(self, env_ids: Array) -> Array:
        live = [self._envs[i] for i in env_ids.tolist()]
        base: list[Any] = [one.env.unwrapped for one in live]
        game = self.players > 1
        ids = self.put(np.stack([env.row for env in base]), np.array([env.to_play if game else 0 for env in base]))
        self._over[ids] = [one.over for one in (base if game else live)]
        if self._limit is not None:
            self._elapsed[ids] = [max(limit._elapsed_steps or 0 for limit in time_limits(one.env)) for one in live]
            self._over[ids] |= self._elapsed[ids] >= self._limit
        return ids

    def load(self, ids: Array, env_ids: Array) -> Views:
        views = self.look(ids)
        leaves = self.spec.observation.flatten(views.obs)
        for i, (key, env_id) in enumerate(zip(ids.tolist(), env_ids.tolist(), strict=True)):
            live = self._envs[env_id]
            base: Any = live.env.unwrapped
            base.row = self.rows[key].copy()
            if self.players > 1:
                base.to_play, base.over = int(views.to_play[i]), bool(self._over[key])
            for limit in time_limits(live.env):
                limit._elapsed_steps = int(self._elapsed[key])
            live.on_load([leaf[i].copy() for leaf in leaves], bool(self._over[key]), None)
        return views

    def look(self, ids: Array) -> Views:
        self._index.require_given(ids)
        obs, legal = self._view(self.rows[ids])
        if legal is not None:
            legal[self._over[ids]] = False
        return Views(obs, legal, self._index.turn[ids])

    def drop(self, ids: Array) -> None:
        self._index.release(ids)

    def expand(self, parents: Array, actions: Tree, children: Array, seeds: Array | None = None) -> Expansion:
        """Step copies of the parents' rows. Moves of games must be legal."""
        self._require_live(parents)
        self._index.require_given(children)
        rows, turn, faulty = self.rows[parents], self._index.turn[parents], None
        reward, terminated, truncated = self.model.step(rows, actions, seeds)
        if self._limit is not None:
            elapsed = self._elapsed[parents] + 1
            self._elapsed[children], truncated = elapsed, truncated | (elapsed >= self._limit)
        obs, legal = self._view(rows)
        if not self._finite:
            faulty = self._note_failed(reward, obs)
        if faulty is not None:
            rows[faulty] = self.rows[parents[faulty]]
            (obs, legal), reward = self._view(rows), np.where(faulty, 0.0, reward)
            terminated, truncated = terminated & ~faulty, truncated | faulty
        over = terminated | truncated
        if self.players > 1:
            turn = 1 - turn
        if legal is not None:
            legal[over] = False
        self.rows[children], self._index.turn[children], self._over[children] = rows, turn, over
        return Expansion(children, obs, reward, terminated, truncated, legal, turn, faulty)

    def rollout(self, parents: Array, actions: Tree, seeds: Array | None = None) -> Rollouts:
        """Step copies of rows until their episodes or the actions end. Moves of games must be legal."""
        self._require_live(parents)
        rows, count = self.rows[parents], self.spec.action.flatten(actions)[0].shape[1]
        reward, length = np.zeros((len(parents), count)), np.zeros(len(parents), np.int64)
        terminated, truncated = np.zeros(len(parents), np.bool_), np.zeros(len(parents), np.bool_)
        live = np.arange(len(parents))
        for t in range(count):
            some = rows[live]
            chosen = tree_map(lambda leaf: leaf[live, t], actions)  # noqa: B023 - used at once
            again = None if seeds is None else seeds[live] + np.uint64(t)
            reward[live, t], terminated[live], truncated[live] = self.model.step(some, chosen, again)
            rows[live] = some
            length[live] += 1
            if self._limit is not None:
                truncated[live] |= self._elapsed[parents[live]] + t + 1 >= self._limit
            live = live[~(terminated | truncated)[live]]
            if not len(live):
                break
        obs, _ = self._view(rows)
        faulty = None if self._finite else self._note_failed(reward, obs)
        if faulty is not None:
            reward = np.where(np.isfinite(reward), reward, 0.0)
            obs, _ = self._view(np.where(faulty[:, None], self.rows[parents], rows))
            terminated, truncated = terminated & ~faulty, truncated | faulty
        return Rollouts(reward, length, obs, terminated, truncated, faulty)

    def close(self) -> None:
        self.drop(np.arange(len(self.rows)))
        for env in self._envs:
            env.release()

    def _view(self, rows: Array) -> tuple[Tree, Array | None]:
        if self.players > 1:
            obs, legal = self.model.look(rows)
            return obs, legal
        layout = self.spec.observation
        flat = zip(layout.leaves, layout.flatten(self.model.look(rows)), strict=True)
        return layout.unflatten([np.asarray(value, leaf.dtype) for leaf, value in flat]), None

    def _note_failed(self, reward: Array, obs: Tree) -> Array | None:
        failed, message, layout = _not_finite(reward, obs), _NOT_FINITE, self.spec.observation
        leaves = layout.flatten(obs)
        if (outside := layout.outside(leaves)) is not None:
            failed, message = failed | outside, str(layout.range_problem([leaf[outside.argmax()] for leaf in leaves]))
        return self._failed_steps.note(failed, message)

    def _require_live(self, ids: Array) -> None:
        self._index.require_given(ids)
        if self._over[ids].any():
            raise UserError(f"State {ids[self._over[ids]][0]} is the end of an episode: no step from it is possible.")


def _not_finite(*trees: Tree) -> Array:
    good: list[Array] = []
    tree_map(lambda leaf: good.append(np.isfinite(leaf).reshape(len(leaf), -1).all(1)), trees)
    bad: Array = ~np.logical_and.reduce(good)
    return bad
