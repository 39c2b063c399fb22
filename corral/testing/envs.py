"""Small environments whose every number is known, to catch errors between a simulator and a learner."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from corral.core.types import Array

Env = gymnasium.Env[Array, Any]


class CountingEnv(Env):
    """Counts. The observation is (id, episode, step of the episode, step of its life); the reward is the step. `id` is
    drawn from the seed, so equal ids reveal equal seeds. Gaps, repeats, missing final observations and padding rows
    show in the numbers. Episodes end after `length` steps (never, for 0) with `end`: "terminated", "truncated", "both",
    or "mixed", which cycles through the three.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - gymnasium's own convention

    def __init__(
        self, length: int = 5, end: str = "terminated", reuse_buffer: bool = False, reward_shape: tuple[int, ...] = ()
    ):
        self.observation_space = spaces.Box(0, 2**31, (4,), np.float64)
        self.action_space = spaces.Discrete(3)
        self._length, self._end, self._reward_shape = length, end, reward_shape
        self._buffer = np.zeros(4) if reuse_buffer else None
        self._id = self._life = 0
        self._episode = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._id = int(self.np_random.integers(2**31))
            self._episode = -1
        self._episode += 1
        self._t = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"not an action: {action!r}"
        self._t += 1
        self._life += 1
        over = self._length > 0 and self._t >= self._length
        end = ("terminated", "truncated", "both")[self._episode % 3] if self._end == "mixed" else self._end
        reward: Any = float(self._t)
        if self._reward_shape:
            reward = np.full(self._reward_shape, reward)
        return self._observe(), reward, over and end != "truncated", over and end != "terminated", {}

    def _observe(self) -> Array:
        obs = np.zeros(4) if self._buffer is None else self._buffer
        obs[:] = (self._id, self._episode, self._t, self._life)
        return obs


class OneStateEnv(Env):
    """One state, reward 1 forever, cut by a time limit: the true value is 1 / (1 - gamma) for any limit."""

    def __init__(self, limit: int = 5):
        self.observation_space = spaces.Box(0, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._limit = limit

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return np.ones(1, np.float32), 1.0, False, self._t >= self._limit, {}


class FaultyEnv(CountingEnv):
    """Counts, and fails at step `at` of every `every`-th episode (from the second on) by raise, exit,
    interrupt, kill, hang, nan or nan_reward, or in the reset that follows by raise_reset.
    """

    def __init__(self, kind: str, at: int = 3, every: int = 2, length: int = 5):
        super().__init__(length=length)
        self._kind, self._at, self._every = kind, at, every

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        if self._kind == "raise_reset" and seed is None and (self._episode + 1) % self._every == self._every - 1:
            raise RuntimeError("the simulator would not reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if self._t == self._at and self._episode % self._every == self._every - 1:
            if self._kind == "raise":
                raise RuntimeError("the simulator broke")
            if self._kind == "exit":
                raise SystemExit(3)
            if self._kind == "interrupt":
                raise KeyboardInterrupt  # as a library does that counts Ctrl-C, or a debugger
            if self._kind == "kill":
                os.kill(os.getpid(), 9)  # SIGKILL, for which Windows has no name
            if self._kind == "hang":
                time.sleep(3600)
            if self._kind == "nan":
                obs[0] = np.nan
            if self._kind == "nan_reward":
                reward = float("inf")
        return obs, reward, terminated, truncated, info


class SlowEnv(CountingEnv):
    """Counts, and waits between `low` and `high` seconds in every step, like a remote simulator."""

    def __init__(self, low: float = 0.01, high: float = 0.05, length: int = 100):
        super().__init__(length=length)
        self._low, self._high = low, high

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        time.sleep(float(self.np_random.uniform(self._low, self._high)))
        return super().step(action)


class BigEnv(Env):
    """Observations of `nbytes` bytes that all differ."""

    def __init__(self, nbytes: int):
        self.observation_space = spaces.Box(0, 255, (nbytes,), np.uint8)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._base, self._t = int(self.np_random.integers(256)), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return self._observe(), 0.0, self._t >= 3, False, {}

    def _observe(self) -> Array:
        obs = np.full(self.observation_space.shape or (1,), self._base, np.uint8)
        obs[:8] = obs[-8:] = self._t
        return obs


class TreeEnv(gymnasium.Env[Any, Any]):
    """Nested observations and hybrid actions: every action leaf is returned in the next observation."""

    def __init__(self, length: int = 4) -> None:
        self.action_space = spaces.Dict(
            {
                "gear": spaces.Discrete(3, start=1),
                "move": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(3))),
                "keys": spaces.MultiDiscrete([2, 5]),
            }
        )
        self.observation_space = spaces.Dict({"echo": self.action_space, "t": spaces.Box(0, 100, (), np.int32)})
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.action_space.seed(seed)
        self._t = 0
        return {"echo": self.action_space.sample(), "t": np.int32(0)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        assert self.action_space.contains(action), f"not an action: {action!r}"
        return {"echo": action, "t": np.int32(self._t)}, 0.0, self._t >= self._length, False, {}


class LivesEnv(CountingEnv):
    """A game of three lives of `length` steps each, with rewards 5 and -3 in turn."""

    def __init__(self, length: int = 4):
        super().__init__(length=3 * length)
        self._per_life = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"lives": 3}

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, _ = super().step(action)
        return obs, 5.0 if self._t % 2 else -3.0, terminated, truncated, {"lives": 3 - self._t // self._per_life}


class IdentityEnv(gymnasium.Env[Any, Any]):
    """Shows the wanted action: reward 1 for each step that takes it, so a perfect game of 100 steps returns 100. `kind`
    is the space of both: "discrete", "multi_discrete", "box", or "hybrid", a Dict of a choice and a number. Numbers
    earn `1 - distance`, at least 0. Games end by a time limit after `length` steps.
    """

    def __init__(self, kind: str = "discrete", length: int = 100):
        parts: dict[str, spaces.Space[Any]] = {
            "discrete": spaces.Discrete(4),
            "multi_discrete": spaces.MultiDiscrete([3, 3]),
            "box": spaces.Box(-1, 1, (1,), np.float32),
        }
        parts["hybrid"] = spaces.Dict({"choice": spaces.Discrete(3), "number": parts["box"]})
        self.observation_space = self.action_space = parts[kind]
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._t, self._wanted = 0, self.observation_space.sample()
        return self._wanted, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"not an action: {action!r}"
        reward = _agreement(self.action_space, action, self._wanted)
        self._t, self._wanted = self._t + 1, self.observation_space.sample()
        return self._wanted, reward, False, self._t >= self._length, {}


def _agreement(space: spaces.Space[Any], action: Any, wanted: Any) -> float:
    if isinstance(space, spaces.Dict):
        return float(np.mean([_agreement(sub, action[key], wanted[key]) for key, sub in space.spaces.items()]))
    if isinstance(space, spaces.Box):
        return max(0.0, 1.0 - float(np.abs(action - wanted).max()))
    return float(np.array_equal(action, wanted))
