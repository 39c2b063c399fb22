"""Wrappers around one environment: Atari's usual ones, and those that any environment may want.

Gray and smaller images are `GrayscaleObservation` and `ResizeObservation` of `gymnasium.wrappers`, right as
they are; here is what Gymnasium has not, or has otherwise. Two keys of `info` are understood by every backend
of Corral: `raw_reward`, the game's own reward where `reward` is another, and `life_lost`, an end that is not
the end of the game.
"""

from __future__ import annotations

import copy
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from corral.core.errors import UserError
from corral.core.types import Array, tree_map

Env = gymnasium.Env[Any, Any]
Wrapper = gymnasium.Wrapper[Any, Any, Any, Any]
Info = dict[str, Any]
Step = tuple[Any, SupportsFloat, bool, bool, Info]


class FireReset(Wrapper):
    """Presses FIRE once at the start of a game, for games that wait for it; others are left alone."""

    def __init__(self, env: Env):
        super().__init__(env)
        if not hasattr(env.unwrapped, "get_action_meanings"):
            raise UserError("FireReset needs get_action_meanings(), as ALE's environments have it.")
        meanings = env.unwrapped.get_action_meanings()
        self.fire = meanings.index("FIRE") if "FIRE" in meanings else None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start a game."""
        obs, info = self.env.reset(seed=seed, options=options)
        if self.fire is None:
            return obs, info
        obs, _, terminated, truncated, info = self.env.step(self.fire)
        return self.env.reset(options=options) if terminated or truncated else (obs, info)


class NoopReset(Wrapper):
    """Starts an episode with a random number of no-ops, below `noop_max`; action 0 must do nothing.

    `pressed` is how many of them count as done because something else was pressed at the start. The number is
    drawn as ALE's native vector environment draws it, so the same seed gives the same games there.
    """

    def __init__(self, env: Env, noop_max: int = 30, pressed: int = 0):
        super().__init__(env)
        self._noop_max, self._pressed = noop_max, pressed
        self._random = np.random.RandomState()

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode and let it run idle for a while."""
        obs, info = self.env.reset(seed=seed, options=options)
        if seed is not None:
            self._random = np.random.RandomState(seed)
        # What libstdc++ makes of std::uniform_int_distribution over std::mt19937.
        count = (int(self._random.randint(2**32, dtype=np.uint32)) * self._noop_max) >> 32
        for _ in range(count - self._pressed):
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        return obs, info


class FrameSkip(Wrapper):
    """Repeats each action `skip` times and adds up the rewards; the last observation is returned."""

    def __init__(self, env: Env, skip: int = 4):
        super().__init__(env)
        self._skip = skip

    def step(self, action: Any) -> Step:
        """Repeat an action until the frames are through or the episode ends."""
        total = raw = 0.0
        for left in reversed(range(self._skip)):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            raw += float(info.get("raw_reward", reward))
            if terminated or truncated:
                break
            self._see(obs, left)
        if "raw_reward" in info:
            info["raw_reward"] = raw
        return self._show(obs), total, terminated, truncated, info

    def _see(self, obs: Any, left: int) -> None:
        """Look at an observation that does not end the episode, `left` frames before the last."""

    def _show(self, last: Any) -> Any:
        """The observation to return."""
        return last


class MaxAndSkip(FrameSkip):
    """Repeats each action `skip` times and shows the pixel-wise maximum of the last two frames.

    Consoles draw some sprites in every second frame only. A frame in which the episode ends is not looked at,
    as in ALE's native vector environment: what was seen before stays.
    """

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode; its first frame is shown alone."""
        obs, info = self.env.reset(seed=seed, options=options)
        self._last = self._before = obs.copy()
        return obs, info

    def _see(self, obs: Array, left: int) -> None:
        if left == 1:
            self._before = obs.copy()
        elif left == 0:
            self._last = obs.copy()

    def _show(self, last: Array) -> Array:
        if self._skip > 1:
            self._last = np.maximum(self._last, self._before)
        shown: Array = self._last.copy()
        return shown


class EpisodicLife(Wrapper):
    """Ends the episode when a life is lost, though the game goes on; `info["life_lost"]` tells the two apart.

    The reset that follows a lost life continues the game where it is. It takes no step of its own, so no
    reward of the game is missed.
    """

    def __init__(self, env: Env):
        super().__init__(env)
        self._lives = 0
        self._continues: tuple[Any, Info] | None = None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Continue with the next life, or start a game if the last one is over or a seed is given."""
        continues, self._continues = self._continues, None
        if continues is not None and seed is None:
            return continues
        obs, info = self.env.reset(seed=seed, options=options)
        self._lives = info.get("lives", 0)
        return obs, info

    def step(self, action: Any) -> Step:
        """Step, and end the episode if it cost a life."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if "lives" not in info:
            raise UserError("EpisodicLife needs info['lives'], as ALE's environments give it.")
        lives = info["lives"]
        self._continues = None
        if 0 < lives < self._lives and not (terminated or truncated):
            self._continues = tree_map(np.copy, obs), dict(info)
            terminated, info = True, {**info, "life_lost": True}
        self._lives = lives
        return obs, reward, terminated, truncated, info


class ClipReward(Wrapper):
    """Clips rewards to [-1, 1] for learning; `info["raw_reward"]` keeps the game's own."""

    def step(self, action: Any) -> Step:
        """Step and clip."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        info.setdefault("raw_reward", float(reward))
        return obs, max(-1.0, min(1.0, float(reward))), terminated, truncated, info


class FrameStack(Wrapper):
    """Shows the last `size` observations, oldest first; a new episode's first one is repeated.

    Unlike Gymnasium's it copies what it is given, so an environment may reuse its observation buffer.
    """

    def __init__(self, env: Env, size: int = 4):
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box):
            raise UserError(f"FrameStack needs Box observations, got {space}.")
        low, high = np.stack([space.low] * size), np.stack([space.high] * size)
        self.observation_space = spaces.Box(low, high, dtype=space.dtype.type)
        self._frames = np.zeros_like(low)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode with its first observation everywhere."""
        obs, info = self.env.reset(seed=seed, options=options)
        self._frames[:] = obs
        return self._frames.copy(), info

    def step(self, action: Any) -> Step:
        """Step and push."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._frames[:-1] = self._frames[1:]
        self._frames[-1] = obs
        return self._frames.copy(), reward, terminated, truncated, info


def set_time_limit(env: Env, max_steps: int | None) -> Env:
    """The environment with a limit of `max_steps` in place of the ones it has, or with None at all."""
    while isinstance(env, TimeLimit):
        env = env.env
    outer = env
    while isinstance(outer, gymnasium.Wrapper):
        while isinstance(outer.env, TimeLimit):
            outer.env = outer.env.env
        outer._cached_spec = None
        outer = outer.env
    if outer.spec is not None:
        outer.spec = copy.deepcopy(outer.spec)
        outer.spec.max_episode_steps = None
    return env if max_steps is None else TimeLimit(env, max_steps)
