"""Wrappers around one environment: the usual Atari ones, and general ones.

For gray and smaller images use `GrayscaleObservation` and `ResizeObservation` of `gymnasium.wrappers`; this module has
what Gymnasium lacks or does differently. Every backend understands two keys of `info`: `raw_reward`, the unclipped
reward, and `life_lost`, a termination that does not end the game.
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
    """Presses FIRE once at the start of games that wait for it; does nothing for others."""

    def __init__(self, env: Env):
        super().__init__(env)
        if not hasattr(env.unwrapped, "get_action_meanings"):
            raise UserError("FireReset needs get_action_meanings(), as in ALE's environments.")
        meanings = env.unwrapped.get_action_meanings()
        self.fire = meanings.index("FIRE") if "FIRE" in meanings else None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        if self.fire is None:
            return obs, info
        obs, _, terminated, truncated, info = self.env.step(self.fire)
        return self.env.reset(options=options) if terminated or truncated else (obs, info)


class NoopReset(Wrapper):
    """Starts an episode with a random number of no-ops, below `noop_max`; action 0 must do nothing. `pressed` (buttons
    already pressed at the start) is subtracted from it. The number is drawn as in ALE's native vector environment, so
    the same seed gives the same games there.
    """

    def __init__(self, env: Env, noop_max: int = 30, pressed: int = 0):
        super().__init__(env)
        self._noop_max, self._pressed = noop_max, pressed
        self._random = np.random.RandomState()

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        if seed is not None:
            self._random = np.random.RandomState(seed)
        # Equals libstdc++'s std::uniform_int_distribution over std::mt19937.
        count = (int(self._random.randint(2**32, dtype=np.uint32)) * self._noop_max) >> 32
        for _ in range(count - self._pressed):
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        return obs, info


class FrameSkip(Wrapper):
    """Repeats each action `skip` times and sums the rewards; returns the last observation."""

    def __init__(self, env: Env, skip: int = 4):
        super().__init__(env)
        self._skip = skip

    def step(self, action: Any) -> Step:
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
        """Called for each observation that does not end the episode, `left` frames before the end of the skip."""

    def _show(self, last: Any) -> Any:
        return last


class MaxAndSkip(FrameSkip):
    """Repeats each action `skip` times and returns the pixel-wise maximum of the last two frames. Consoles draw some
    sprites only in every second frame. As in ALE's native vector environment, a frame that ends the episode is ignored:
    the observation is from the frames before.
    """

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
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
    """Ends the episode when a life is lost although the game continues; `info["life_lost"]` marks such ends. The reset
    after a lost life continues the game without another step, so no reward is missed.
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
        obs, reward, terminated, truncated, info = self.env.step(action)
        if "lives" not in info:
            raise UserError("EpisodicLife needs info['lives'], as in ALE's environments.")
        lives = info["lives"]
        self._continues = None
        if 0 < lives < self._lives and not (terminated or truncated):
            self._continues = tree_map(np.copy, obs), dict(info)
            terminated, info = True, {**info, "life_lost": True}
        self._lives = lives
        return obs, reward, terminated, truncated, info


class ClipReward(Wrapper):
    """Clips rewards to [-1, 1] for training; `info["raw_reward"]` keeps the unclipped reward."""

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = self.env.step(action)
        info.setdefault("raw_reward", float(reward))
        return obs, max(-1.0, min(1.0, float(reward))), terminated, truncated, info


class FrameStack(Wrapper):
    """Returns the last `size` observations, oldest first; an episode's first one is repeated. Unlike Gymnasium's it
    copies observations, so an environment may reuse its buffer.
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
        obs, info = self.env.reset(seed=seed, options=options)
        self._frames[:] = obs
        return self._frames.copy(), info

    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._frames[:-1] = self._frames[1:]
        self._frames[-1] = obs
        return self._frames.copy(), reward, terminated, truncated, info


def set_time_limit(env: Env, max_steps: int | None) -> Env:
    """Replace the environment's time limits by one of `max_steps`; None removes them."""
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
