"""A run of an environment that nothing interrupted: what saves, loads and expansions must bring out again."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from corral.core.legal import legal
from corral.core.spaces import Layout

Env = gymnasium.Env[Any, Any]


@dataclass
class Seen:
    """What one step gave, as bytes where they must be equal."""

    obs: bytes
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def ended(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


class Run:
    """Random legal actions in an environment, which is closed then, with a reset after every end."""

    def __init__(self, env: Env, steps: int):
        self.actions: list[Any] = []
        self.seen: list[Seen] = []
        _, info = env.reset(seed=0)
        for action in draw_actions(env, steps):
            if self.seen and self.seen[-1].ended:
                _, info = env.reset()
            self.actions.append(legal(action, info))
            self.seen.append(make_step(env, self.actions[-1]))
            info = self.seen[-1].info
        env.close()

    def follow(self, env: Any, at: int) -> Seen:
        """Make the step `at` of the run, preceded by a reset where the one before ended an episode."""
        if at and self.seen[at - 1].ended:
            env.reset()
        return make_step(env, self.actions[at])


def make_step(env: Any, action: Any) -> Seen:
    """Step, and note what came out."""
    obs, reward, terminated, truncated, info = env.step(action)
    value = float(np.asarray(reward).reshape(()))
    return Seen(obs_bytes(Layout(env.observation_space), obs), value, bool(terminated), bool(truncated), info)


def obs_bytes(layout: Layout, obs: Any) -> bytes:
    """An observation as bytes."""
    leaves = zip(layout.leaves, layout.flatten(obs), strict=True)
    return b"".join(np.asarray(value, leaf.dtype).tobytes() for leaf, value in leaves)


def draw_actions(env: Env, count: int) -> list[Any]:
    """Random ones, drawn elsewhere than from the environment's own space."""
    space = copy.deepcopy(env.action_space)
    space.seed(5)
    return [space.sample() for _ in range(count)]
