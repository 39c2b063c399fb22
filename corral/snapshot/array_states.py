"""States of environments whose dynamics are a function of rows of numbers: saved by a copy, stepped all at once.

An environment takes part by saying so:

```python
class Walk(gymnasium.Env):
    rows = WalkRows()  # a RowModel

    @property
    def row(self) -> np.ndarray: ...  # the state that it is in, as numbers

    @row.setter
    def row(self, row): ...
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from corral.core.errors import UserError
from corral.core.gym_env import PassiveWrapper, layers
from corral.core.types import Array, EnvSpec, Tree, tree_map
from corral.snapshot.shelf import StateIndex
from corral.snapshot.states import Expansion, FailedSteps, Level, Rollouts, States, Views, turns

Env = gymnasium.Env[Any, Any]
_NOT_FINITE = "it gave an observation or a reward that is not finite"
_TRANSPARENT = (TimeLimit, OrderEnforcing, PassiveEnvChecker, PassiveWrapper)


@runtime_checkable
class RowModel(Protocol):
    """What an environment does, as a function of many states at once: rows [n, width] of float64."""

    width: int
    stochastic: bool
    """Whether steps throw dice. They are then thrown by `seeds`, one for each row; without, by what is in the row."""

    def look(self, rows: Array) -> Tree:
        """Observations [n, ...]."""

    def step(self, rows: Array, actions: Tree, seeds: Array | None) -> tuple[Array, Array, Array]:
        """Step rows in place; rewards, and which have terminated or were truncated, [n] each."""


def has_rows(env: Env) -> bool:
    """Whether an environment has a row model, and nothing around it but time limits and checks."""
    *around, inside = layers(env)
    return isinstance(getattr(inside, "rows", None), RowModel) and all(isinstance(w, _TRANSPARENT) for w in around)


class RowStates(States):
    """States of environments in this process, by row; the last number of a row counts the steps of its episode."""

    level = Level.MEMORY

    def __init__(self, environment: Callable[[int], Env], spec: EnvSpec, memory_mb: float = 1024.0):
        self._environment, self.spec = environment, spec
        self._model: RowModel = environment(0).unwrapped.rows  # type: ignore[attr-defined]
        self.stochastic = self._model.stochastic
        limits = [layer._max_episode_steps for layer in layers(environment(0)) if isinstance(layer, TimeLimit)]
        self._limit = min(limits, default=np.inf)
        bytes_of_row = 8 * (self._model.width + 1)
        seen = sum(leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in spec.observation.leaves)
        self._shelf = StateIndex(spec.observation.leaves, memory_mb * seen / (seen + bytes_of_row), spec.name)
        self.rows, self._over = np.zeros((0, self._model.width + 1)), np.zeros(0, np.bool_)
        self._mishaps = FailedSteps(spec.name)

    def new_ids(self, count: int) -> Array:
        """Rows that nothing is in."""
        ids = self._shelf.new_ids(count)
        if len(self.rows) < len(self._shelf.home):
            grown = np.zeros((len(self._shelf.home), self.rows.shape[1]))
            grown[: len(self.rows)] = self.rows
            over = np.zeros(len(grown), np.bool_)
            over[: len(self._over)] = self._over
            self.rows, self._over = grown, over
        return ids

    def save(self, env_ids: Array) -> Array:
        """Copy the rows of these environments."""
        ids = self.new_ids(len(env_ids))
        for row, env_id in zip(ids.tolist(), env_ids.tolist(), strict=True):
            env = self._environment(env_id)
            self.rows[row] = [*env.unwrapped.row, _elapsed(env)]  # type: ignore[attr-defined]
        self._over[ids] = self.rows[ids, -1] >= self._limit
        self._see(ids)
        return ids

    def load(self, ids: Array, env_ids: Array) -> Views:
        """Give these environments their rows back."""
        scene = self.look(ids)
        for row, env_id in zip(ids.tolist(), env_ids.tolist(), strict=True):
            env = self._environment(env_id)
            env.unwrapped.row = self.rows[row, :-1].copy()  # type: ignore[attr-defined]
            for layer in layers(env):
                if isinstance(layer, TimeLimit):
                    layer._elapsed_steps = int(self.rows[row, -1])  # type: ignore[assignment]
        return scene

    def look(self, ids: Array) -> Views:
        """What is seen there."""
        self._shelf.require_given(ids)
        obs = self.spec.observation.unflatten([leaf[ids] for leaf in self._shelf.obs])
        return Views(obs, None, turns(len(ids)))

    def drop(self, ids: Array) -> None:
        """Give rows back."""
        self._shelf.release(ids)

    def expand(self, parents: Array, actions: Tree, children: Array, seeds: Array | None = None) -> Expansion:
        """Copy the parents' rows, and step there."""
        self._require_going_on(parents)
        self._shelf.require_given(children)
        before = self.rows[parents]
        rows = before.copy()
        reward, terminated, truncated = self._step(rows, actions, seeds)
        self.rows[children] = rows
        obs = self._see(children)
        faulty = self._mishaps.note(not_finite(reward, obs), _NOT_FINITE)
        if faulty is not None:
            self.rows[children] = np.where(faulty[:, None], before, rows)
            obs, reward = self._see(children), np.where(faulty, 0.0, reward)
            terminated, truncated = terminated & ~faulty, truncated | faulty
        self._over[children] = terminated | truncated
        return Expansion(children, obs, reward, terminated, truncated, None, turns(len(parents)), faulty)

    def rollout(self, parents: Array, actions: Tree, seeds: Array | None = None) -> Rollouts:
        """Step on from each row, until its episode ends or the actions do."""
        self._require_going_on(parents)
        rows, count = self.rows[parents], self.spec.action.flatten(actions)[0].shape[1]
        reward, length = np.zeros((len(parents), count)), np.zeros(len(parents), np.int64)
        terminated, truncated = np.zeros(len(parents), np.bool_), np.zeros(len(parents), np.bool_)
        live = np.arange(len(parents))
        for t in range(count):
            some = rows[live]
            chosen = tree_map(lambda leaf: leaf[live, t], actions)  # noqa: B023 - used at once
            again = None if seeds is None else seeds[live] + np.uint64(t)
            reward[live, t], terminated[live], truncated[live] = self._step(some, chosen, again)
            rows[live] = some
            length[live] += 1
            live = live[~(terminated | truncated)[live]]
            if not len(live):
                break
        obs = self._model.look(rows[:, :-1])
        faulty = self._mishaps.note(not_finite(reward, obs), _NOT_FINITE)
        if faulty is not None:
            reward = np.where(np.isfinite(reward), reward, 0.0)
            obs = self._model.look(np.where(faulty[:, None], self.rows[parents], rows)[:, :-1])
            terminated, truncated = terminated & ~faulty, truncated | faulty
        return Rollouts(reward, length, obs, terminated, truncated, faulty)

    def close(self) -> None:
        """Forget everything."""
        self.drop(np.arange(len(self.rows)))

    def _require_going_on(self, ids: Array) -> None:
        self._shelf.require_given(ids)
        if self._over[ids].any():
            raise UserError(f"State {ids[self._over[ids]][0]} is the end of an episode, from which there is no step.")

    def _step(self, rows: Array, actions: Tree, seeds: Array | None) -> tuple[Array, Array, Array]:
        state = np.ascontiguousarray(rows[:, :-1])
        reward, terminated, truncated = self._model.step(state, actions, seeds)
        rows[:, :-1] = state
        rows[:, -1] += 1
        return (
            np.asarray(reward, np.float64),
            np.asarray(terminated, np.bool_),
            truncated | (rows[:, -1] >= self._limit),
        )

    def _see(self, ids: Array) -> Tree:
        obs = self._model.look(self.rows[ids, :-1])
        leaves = [
            np.asarray(x, leaf.dtype)
            for leaf, x in zip(self.spec.observation.leaves, self.spec.observation.flatten(obs), strict=True)
        ]
        self._shelf.put(ids, np.zeros(len(ids), np.int8), leaves)
        return self.spec.observation.unflatten(leaves)


def not_finite(*trees: Tree) -> Array:
    """Which rows have a number that is not finite, [n]."""
    good: list[Array] = []
    tree_map(lambda leaf: good.append(np.isfinite(leaf).reshape(len(leaf), -1).all(1)), trees)
    bad: Array = ~np.logical_and.reduce(good)
    return bad


def _elapsed(env: Env) -> int:
    """Steps of the episode, as its time limit counts them; 0 where there is none."""
    return max((layer._elapsed_steps or 0 for layer in layers(env) if isinstance(layer, TimeLimit)), default=0)
