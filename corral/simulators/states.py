"""Snapshots of Python environments: copies by id, within a budget of bytes and count."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from corral.link import protocol as clp
from corral.link.control import Budget
from corral.spaces import Layout
from corral.types import Array

Env = gymnasium.Env[Any, Any]
_UNKNOWN_BYTES = 1 << 16  # of an environment whose size cannot be told
GENERATION_BITS = 40


@dataclass(slots=True)
class State:
    """A copy of an environment that is never stepped, and its last observation. `over`: its episode has ended."""

    env: Env
    obs: list[Array]
    over: bool
    nbytes: int

    def copy_env(self) -> Env:
        """An environment to step."""
        return copy.deepcopy(self.env)


@dataclass(slots=True)
class Expanded:
    """What a step from a state gave."""

    obs: list[Array]
    reward: float = 0.0
    flags: int = 0
    status: int = 0
    text: str = ""


class States:
    """The states of a session. What does not fit is refused; nothing is evicted."""

    def __init__(self, observation: Layout, budget: Budget):
        self._layout, self._budget = observation, budget
        self._states: dict[int, State] = {}
        self.nbytes = 0
        self._env_bytes: int | None = None

    def __len__(self) -> int:
        return len(self._states)

    def save(self, key: int, env: Env | None, obs: list[Array], over: bool = False) -> tuple[int, str]:
        """Keep a copy of the environment; returns status and words."""
        if env is None:
            return clp.Status.E_NO_EPISODE, "the slot has no episode"
        if key == 0:
            return clp.Status.E_BAD_REQUEST, "state 0 cannot be kept"
        nbytes = self._size(env) + sum(leaf.nbytes for leaf in obs)
        old = self._states.get(key)
        spare = old.nbytes if old is not None else 0
        if self.nbytes - spare + nbytes > self._budget.bytes or len(self) - (old is not None) >= self._budget.count:
            return clp.Status.E_SNAPSHOT_FULL, f"{len(self)} states take {self.nbytes} bytes; drop some"
        try:
            kept = copy.deepcopy(env)
        except Exception as error:
            return clp.Status.E_UNSUPPORTED, f"this environment cannot be copied ({error!r})"
        self._states[key] = State(kept, obs, over, nbytes)
        self.nbytes += nbytes - spare
        return clp.Status.OK, ""

    def get(self, key: int) -> State | None:
        """The state of this id."""
        return self._states.get(key)

    def expand(self, parent: int, action: Any, child: int, seed: int) -> Expanded:
        """Step a copy of a state, and keep it as `child` unless that is 0."""
        state = self._states.get(parent)
        zeros = [np.zeros(leaf.shape, leaf.dtype) for leaf in self._layout.leaves]
        if state is None:
            return Expanded(zeros, status=clp.Status.E_UNKNOWN_STATE, text=f"there is no state {parent}")
        if state.over:
            return Expanded(zeros, status=clp.Status.E_NO_EPISODE, text="its episode has ended")
        env = state.copy_env()
        try:
            if seed:
                env.unwrapped.np_random = np.random.default_rng(seed)
            raw, reward, terminated, truncated, _ = env.step(action)
        except Exception as error:
            flags = clp.FAULTY | clp.TRUNCATED
            return Expanded(zeros, flags=flags, status=clp.Status.E_ENV, text=f"step() raised {error!r}")
        obs = [
            np.array(value, leaf.dtype).reshape(leaf.shape)
            for leaf, value in zip(self._layout.leaves, self._layout.flatten(raw), strict=True)
        ]
        flags = bool(terminated) * clp.TERMINATED | bool(truncated) * clp.TRUNCATED
        status, text = self.save(child, env, obs, over=bool(flags)) if child else (clp.Status.OK, "")
        return Expanded(obs, float(np.asarray(reward).reshape(())), flags, status, text)

    def drop(self, keys: list[int]) -> None:
        """Forget these."""
        for key in keys:
            state = self._states.pop(key, None)
            if state is not None:
                self.nbytes -= state.nbytes

    def drop_generation(self, generation: int) -> None:
        """Forget all whose ids have this in their upper bits."""
        self.drop([key for key in self._states if key >> GENERATION_BITS == generation])

    def clear(self) -> None:
        """Forget all."""
        self._states.clear()
        self.nbytes = 0

    def _size(self, env: Env) -> int:
        """What a copy takes, about: measured once, by pickling it and throwing that away."""
        if self._env_bytes is None:
            try:
                self._env_bytes = len(pickle.dumps(env))
            except Exception:
                self._env_bytes = _UNKNOWN_BYTES
        return self._env_bytes
