"""Snapshots of Python environments: states by id, within a budget of bytes and count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from corral.core.gym_env import EnvFactory
from corral.core.spaces import Layout
from corral.core.types import Array
from corral.link import protocol as clp
from corral.link.control import Budget
from corral.snapshot.keeper import CannotSave, StateKeeper
from corral.snapshot.keepers.choose import make_scratch

Env = gymnasium.Env[Any, Any]
GENERATION_BITS = 40


@dataclass(slots=True)
class State:
    """What is kept of an environment, and its last observation. `over`: its episode has ended."""

    kept: Any
    obs: list[Array]
    over: bool
    nbytes: int


@dataclass(slots=True)
class Expanded:
    """What a step from a state gave."""

    obs: list[Array]
    reward: float = 0.0
    flags: int = 0
    status: int = 0
    text: str = ""


def step_once(env: Env, action: Any, layout: Layout) -> Expanded:
    """One step of an environment, which stays where it is even if its episode ends or it fails."""
    try:
        raw, reward, terminated, truncated, _ = env.step(action)
        obs = [
            np.array(value, leaf.dtype).reshape(leaf.shape)
            for leaf, value in zip(layout.leaves, layout.flatten(raw), strict=True)
        ]
        value = float(np.asarray(reward).reshape(()))
    except Exception as error:
        text = f"step() raised {error!r}"
        return Expanded(_zeros(layout), flags=clp.FAULTY | clp.TRUNCATED, status=clp.Status.E_ENV, text=text)
    flags = bool(terminated) * clp.TERMINATED | bool(truncated) * clp.TRUNCATED
    if not all(np.isfinite(leaf).all() for leaf in [*obs, np.array(value)] if leaf.dtype.kind == "f"):
        flags, text = clp.FAULTY | clp.TRUNCATED, "a reward or an observation is not finite"
        return Expanded(_zeros(layout), flags=flags, status=clp.Status.E_NOT_FINITE, text=text)
    return Expanded(obs, value, flags)


def _zeros(layout: Layout) -> list[Array]:
    return [np.zeros(leaf.shape, leaf.dtype) for leaf in layout.leaves]


class States:
    """The states of a session. What does not fit is refused; nothing is evicted."""

    def __init__(self, observation: Layout, budget: Budget, keeping: StateKeeper | None, factory: EnvFactory):
        self._layout, self._budget, self._keeping, self._factory = observation, budget, keeping, factory
        self._scratch: Env | None = None  # steps from states
        self._states: dict[int, State] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._states)

    def save(self, key: int, env: Env | None, obs: list[Array], over: bool = False) -> tuple[int, str]:
        """Keep a copy of the environment; returns status and words."""
        if env is None:
            return clp.Status.E_NO_EPISODE, "the slot has no episode"
        if self._keeping is None:
            return clp.Status.E_UNSUPPORTED, "this environment's state cannot be kept"
        try:
            kept = self._keeping.keep(env)
        except CannotSave as error:
            return clp.Status.E_UNSUPPORTED, str(error)
        return self.put(key, kept, obs, over)

    def put(self, key: int, kept: Any, obs: list[Array], over: bool) -> tuple[int, str]:
        """Keep a state by this id; returns status and words."""
        assert self._keeping is not None
        if key == 0:
            return clp.Status.E_BAD_REQUEST, "state 0 cannot be kept"
        nbytes = self._keeping.nbytes(kept) + sum(leaf.nbytes for leaf in obs)
        old = self._states.get(key)
        spare = old.nbytes if old is not None else 0
        if self.nbytes - spare + nbytes > self._budget.bytes or len(self) - (old is not None) >= self._budget.count:
            return clp.Status.E_SNAPSHOT_FULL, f"{len(self)} states take {self.nbytes} bytes; drop some"
        self._states[key] = State(kept, obs, over, nbytes)
        self.nbytes += nbytes - spare
        return clp.Status.OK, ""

    def check(self, kept: Any, obs: list[Array]) -> None:
        """CannotKeep unless an environment can be brought into this state, and has such observations."""
        if self._keeping is None or not isinstance(kept, bytes) or self._keeping.level < 4:
            raise CannotSave("this environment takes no states from elsewhere")
        if [(leaf.dtype, leaf.shape) for leaf in obs] != [(leaf.dtype, leaf.shape) for leaf in self._layout.leaves]:
            raise CannotSave("its observation does not fit")
        self._enter(kept)

    def put_into(self, env: Env | None, state: State) -> Env:
        """Bring an environment into this state, another one if there is none; returns it. CannotKeep if it fails."""
        assert self._keeping is not None
        env = env or make_scratch(self._factory)
        self._keeping.put(env, state.kept)
        return env

    def get(self, key: int) -> State | None:
        """The state of this id."""
        return self._states.get(key)

    def expand(self, parent: State | None, action: Any, child: int, seed: int) -> Expanded:
        """Step from a state, and keep what comes out as `child` unless that is 0."""
        env, failed = self._open(parent)
        if env is None or self._keeping is None:
            return failed
        if seed:
            self._keeping.reseed(env, seed)
        result = step_once(env, action, self._layout)
        if child and not result.flags & clp.FAULTY:
            result.status, result.text = self.save(child, env, result.obs, over=bool(result.flags))
        return result

    def rollout(self, parent: State | None, actions: list[Any]) -> tuple[Expanded, list[float]]:
        """Step from a state until its episode ends or the actions do; the last step, and all rewards."""
        env, result = self._open(parent)
        rewards: list[float] = []
        for action in actions if env is not None else ():
            assert env is not None
            result = step_once(env, action, self._layout)
            rewards.append(result.reward)
            if result.flags:
                break
        return result, rewards

    def _open(self, state: State | None) -> tuple[Env | None, Expanded]:
        if state is None:
            return None, self._nothing(clp.Status.E_UNKNOWN_STATE, "there is no such state")
        if state.over:
            return None, self._nothing(clp.Status.E_NO_EPISODE, "its episode has ended")
        try:
            return self._enter(state.kept), self._nothing(clp.Status.OK, "")
        except CannotSave as error:
            return None, self._nothing(clp.Status.E_UNSUPPORTED, str(error))

    def _enter(self, kept: Any) -> Env:
        assert self._keeping is not None
        if self._scratch is None:
            self._scratch = make_scratch(self._factory)
        self._keeping.put(self._scratch, kept)
        return self._scratch

    def _nothing(self, status: int, text: str) -> Expanded:
        return Expanded(_zeros(self._layout), status=status, text=text)

    def drop(self, keys: list[int]) -> None:
        """Forget these."""
        for key in keys:
            state = self._states.pop(key, None)
            if state is not None and self._keeping is not None:
                self.nbytes -= state.nbytes
                self._keeping.drop(state.kept)

    def drop_generation(self, generation: int) -> None:
        """Forget all whose ids have this in their upper bits."""
        self.drop([key for key in self._states if key >> GENERATION_BITS == generation])

    def close(self) -> None:
        """Forget all, and end what steps from it."""
        self.drop(list(self._states))
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
