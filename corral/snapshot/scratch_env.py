"""The scratch environment, which steps from kept states so that live ones stay untouched, and its results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from corral.core.gym_env import claim, release
from corral.core.types import Array, EnvSpec
from corral.snapshot.keeper import Env, StateKeeper
from corral.snapshot.keepers.choose import choose_keeper

MakeEnv = Callable[[], Env]


class NotFinite(ValueError):
    """A reward or an observation has a number that is not finite."""


@dataclass(slots=True)
class KeptState:
    """A keeper's state, with the last observation (None if unknown). `over`: its episode has ended."""

    kept: Any
    scratch: ScratchEnv
    obs: list[Array] | None
    over: bool
    turn: int = 0
    legal: Array | None = None
    nbytes: int = 0


class ScratchEnv:
    """An environment that steps from states, and the keeper that loads them."""

    def __init__(self, make: MakeEnv, keeper: StateKeeper | None = None):
        self._make = make
        self._env: Env | None = None
        try:
            self.keeper = keeper or choose_keeper(self.env, make, replay=True)
        except BaseException:
            self.close()
            raise
        self._at: Any = None  # the state that it is in, exactly

    @property
    def env(self) -> Env:
        """The environment, built at first use if the keeper was given."""
        if self._env is None:
            self._env = self._make()
            claim(self._env, self)
        return self._env

    def enter(self, state: KeptState, seed: int | None = None) -> Env:
        """Load a state, and reseed it if a seed is given; CannotSave if that fails."""
        if seed is not None or self._at is not state.kept:
            self._at = None
            self.keeper.load(self.env, state.kept)
        self._at = None
        if seed is not None:
            self.keeper.reseed(self.env, seed)
        return self.env

    def save(self) -> Any:
        self._at = self.keeper.save(self.env)
        return self._at

    def close(self) -> None:
        if self._env is not None:
            release(self._env)
            self._env.close()
            self._env = None


class StepRows:
    """Results of steps, one row each; a step that raises or returns unusable numbers fails its row."""

    def __init__(self, spec: EnvSpec, batch: int):
        self._layout = spec.observation
        self.leaves = self._layout.empty(batch)
        self.reward, self.message = np.zeros(batch), ""
        self.terminated, self.truncated, self.failed = (np.zeros(batch, np.bool_) for _ in range(3))
        self.errors: dict[int, Exception] = {}

    def step(
        self, i: int, step: Callable[[], tuple[Any, Any, Any, Any, dict[str, Any]]], before: list[Array] | None = None
    ) -> dict[str, Any]:
        """Make a step and write row i; returns its info. A failed row has the observation `before`, or zeros."""
        try:
            obs, reward, terminated, truncated, info = step()
            self._write(i, obs, reward, terminated, truncated)
        except Exception as error:
            self.show(i, before)
            self.reward[i], self.terminated[i], self.truncated[i], self.failed[i] = 0.0, False, True, True
            self.errors[i] = error
            return {}
        return info

    def show(self, i: int, obs: list[Array] | None) -> None:
        for k, leaf in enumerate(self.leaves):
            leaf[i] = 0 if obs is None else obs[k]

    def row(self, i: int) -> list[Array]:
        return [leaf[i].copy() for leaf in self.leaves]

    def is_over(self, i: int) -> bool:
        return bool(self.terminated[i] or self.truncated[i])

    def _write(self, i: int, obs: Any, reward: Any, terminated: Any, truncated: Any) -> None:
        for leaf, value, kind in zip(self.leaves, self._layout.flatten(obs), self._layout.leaves, strict=True):
            leaf[i] = value if np.shape(value) == leaf.shape[1:] else np.asarray(value).reshape(leaf.shape[1:])
            if leaf.dtype.kind == "f" and not np.isfinite(leaf[i]).all():
                raise NotFinite("an observation is not finite")
            if kind.is_discrete and not kind.in_range(leaf[i, ...]):
                raise ValueError(kind.problem(leaf[i, ...], "observation"))
        self.reward[i] = reward if type(reward) is float else float(np.asarray(reward).reshape(()))
        if not math.isfinite(self.reward[i]):
            raise NotFinite(f"the reward is {self.reward[i]}")
        self.terminated[i], self.truncated[i] = bool(terminated), bool(truncated)
