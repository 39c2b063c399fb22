"""`LiveEnv`: an environment that its owner steps, with its last observation and its history."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium

from corral.core.spaces import Layout
from corral.core.types import Array
from corral.snapshot.keeper import CannotSave, Env, EpisodeStart
from corral.snapshot.keepers.fields import FieldsKeeper
from corral.snapshot.rng import State, find_generators, read_generators, same_state, write_generators


class LiveEnv(ABC):
    """One environment that its owner steps, and whose states are saved and loaded."""

    @property
    @abstractmethod
    def env(self) -> Env: ...

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether its episode has ended, and no other has begun."""

    @abstractmethod
    def record(self) -> None:
        """From now on record what `episode_start` needs."""

    @abstractmethod
    def last_obs(self) -> list[Array] | None:
        """Leaves of its last observation, as copies; None if unknown."""

    @abstractmethod
    def episode_start(self) -> EpisodeStart | None:
        """How to repeat its episode; None if unknown."""

    @abstractmethod
    def on_load(self, obs: list[Array] | None, over: bool, start: EpisodeStart | None) -> None:
        """Called after a state with this observation was loaded; `start` leads there, if known."""

    def release(self) -> None:  # noqa: B027 - most are not watched
        """Undo the changes made to watch it."""


SINCE_SEED_STEPS, GAME_STEPS = 10_000, 50_000
"""Steps that are repeated at most: since a seed, so that a resume takes seconds, and of one game."""


def same_observation(layout: Layout, obs: Any, saved: list[Array]) -> bool:
    """Whether an observation equals the saved one bit for bit."""
    return all(leaf.tobytes() == kept.tobytes() for leaf, kept in zip(layout.arrays(obs), saved, strict=True))


@dataclass
class _Episode:
    """An episode: how it began, and its actions; or with `after`, how to reach the loaded state that it continues."""

    seed: int | None = None
    options: Any = None
    generators: State = field(default_factory=dict)  # before its reset
    wrappers: Any = None  # their fields at that time
    actions: list[Any] = field(default_factory=list)
    after: EpisodeStart | None = None


class WatchedEnv(LiveEnv):
    """A single environment that its user steps; until `release`, its `step` and `reset` are methods of this object."""

    over = False

    def __init__(self, env: Env, layout: Layout):
        self._env, self._layout = env, layout
        self._step: Callable[..., Any] = env.step
        self._reset: Callable[..., Any] = env.reset
        self._leaves: list[Array] | None = None
        self._recording, self._watching = False, True
        self._before: dict[str, Any] = {name: vars(env)[name] for name in ("step", "reset") if name in vars(env)}
        self._since: list[Any] | None = None  # actions since `mark`, one too many at most; None after a load or reset
        self._games: list[_Episode] = []  # since a seed, while that is recent
        self._wrappers = FieldsKeeper(base=False) if isinstance(env, gymnasium.Wrapper) else None
        env.step, env.reset = self._watched_step, self._watched_reset  # type: ignore[method-assign]

    @property
    def env(self) -> Env:
        return self._env

    def record(self) -> None:
        self._recording = True

    def last_obs(self) -> list[Array] | None:
        return None if self._leaves is None else [leaf.copy() for leaf in self._leaves]

    def set_obs(self, obs: Any) -> None:
        self._leaves = self._layout.arrays(obs)

    def mark(self) -> None:
        """Start the sequence of actions that `took` returns."""
        self._since = []

    def took(self, count: int) -> list[Any] | None:
        """The actions since `mark`, if there are `count` and the environment was not reset or loaded since."""
        return self._since if self._since is not None and len(self._since) == count else None

    def episode_start(self) -> EpisodeStart | None:
        if not self._games or len(self._games[-1].actions) > GAME_STEPS or self._leaves is None:
            return None
        *past, last = self._games
        games = [*past, replace(last, actions=list(last.actions))]
        shown, now = [leaf.copy() for leaf in self._leaves], read_generators(find_generators(self._env))
        nbytes = 1000 + 100 * sum(len(game.actions) for game in games)
        return EpisodeStart(lambda env: self._repeat(env, games, shown, now), nbytes)

    def on_load(self, obs: list[Array] | None, over: bool, start: EpisodeStart | None) -> None:
        self._leaves, self.over = None if obs is None else [leaf.copy() for leaf in obs], over
        self._games, self._since = [] if start is None else [_Episode(after=start)], None

    def release(self) -> None:
        """Restore the environment's own functions, unless a later watcher replaced them."""
        self._watching = False
        if getattr(vars(self._env).get("step"), "__self__", None) is self:
            self._put_back(self._env)

    def _put_back(self, env: Env) -> None:
        """Undo the replacement of its functions by this watcher and by released earlier ones."""
        for name in ("step", "reset"):
            vars(env).pop(name, None)
        vars(env).update(self._before)
        below = getattr(self._before.get("step"), "__self__", None)
        if isinstance(below, WatchedEnv) and not below._watching:
            below._put_back(env)

    def _watched_step(self, action: Any) -> Any:
        if not self._watching:
            return self._step(action)
        if self._since is not None and len(self._since) < 2:
            self._since.append(copy.deepcopy(action))
        if self._recording and self._games:
            actions = self._games[-1].actions
            if len(actions) <= GAME_STEPS:
                actions.append(copy.deepcopy(action))
        self._leaves = None  # if it raises
        result = self._step(action)
        self.set_obs(result[0])
        self.over = bool(result[2] or result[3])
        return result

    def _watched_reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if not self._watching:
            return self._reset(seed=seed, options=options)
        if self._recording:
            generators = read_generators(find_generators(self._env))
            game = _Episode(seed, copy.deepcopy(options), generators, self._keep_wrappers())
            long = sum(1 + len(game.actions) for game in self._games) > SINCE_SEED_STEPS
            self._games = [game] if seed is not None or long or not self._games else [*self._games, game]
        self._leaves = self._since = None
        result = self._reset(seed=seed, options=options)
        self.set_obs(result[0])
        self.over = False
        return result

    def _keep_wrappers(self) -> Any:
        try:
            return None if self._wrappers is None else self._wrappers.save(self._env)
        except CannotSave:
            return None

    def _repeat(self, env: Env, games: list[_Episode], shown: list[Array], now: State) -> Any:
        obs = None
        for k, game in enumerate(games):
            if game.after is not None:
                obs = game.after.repeat(env)
            else:
                if k == 0:
                    env.reset(seed=0)  # builds what only a first reset builds
                    if self._wrappers is not None and game.wrappers is not None:
                        self._wrappers.load(env, game.wrappers)
                    write_generators(find_generators(env), game.generators)
                obs, _ = env.reset(seed=game.seed, options=copy.deepcopy(game.options))
            for action in game.actions:
                obs = env.step(copy.deepcopy(action))[0]
        same = same_observation(self._layout, obs, shown)
        if not (same and same_state(read_generators(find_generators(env)), now)):
            raise CannotSave("replaying its actions led to a different state: it is not deterministic")
        return obs


def unwatch(copied: Env) -> None:
    """Restore the functions of a copied environment, if the original was watched."""
    while isinstance(watch := getattr(vars(copied).get("step"), "__self__", None), WatchedEnv):
        watch._watching = False
        watch._put_back(copied)
