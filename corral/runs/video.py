"""Seeing a policy play: on the screen, or as a video file."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from corral.acting.policy import Policy
from corral.envs.contract import VecEnv
from corral.envs.make import make_vec
from corral.envs.resolve import resolve
from corral.envs.suites.atari import AtariSuite
from corral.envs.suites.pixels import PixelSuite
from corral.errors import RunFailed, UserError
from corral.experiment import Experiment
from corral.types import Array

_FPS = 30.0  # where an environment does not say
_EXTRA = "pip install 'corral-rl[video]'"
_RENDER_S = 600.0  # a step may take as long as somebody holds the window


@dataclass(frozen=True)
class Recording:
    """What a video shows."""

    path: Path
    frames: int
    fps: float
    returns: tuple[float, ...]
    """Of the episodes that are in it as a whole."""

    @property
    def seconds(self) -> float:
        """How long it plays."""
        return self.frames / self.fps


def record(
    experiment: Experiment,
    policy: Policy,
    path: str | Path,
    *,
    episodes: int = 1,
    seconds: float = 120.0,
    fps: float | None = None,
    seed: int = 0,
) -> Recording:
    """Film the policy for so many whole games, or so many seconds: one frame before the first step, one after each.

    Writes H.264 in an MP4 that is there whole or not at all.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame would look for a screen
    path, frames = Path(path), list[Array]()
    env, build = _builder(experiment, "rgb_array")

    def camera() -> gymnasium.Env[Any, Any]:
        return _Camera(build(), frames)

    with _make_one(camera, experiment.env) as vec:
        vec.reset(seed)
        batch = vec.recv()
        rate = fps or _natural_fps(env, frames_per_s(vec))
        state, count, running, returns = policy.initial_state(1), 0, 0.0, list[float]()
        with _writer(path, rate) as write:
            while len(returns) < episodes and count < seconds * rate:
                action, state, _ = policy.act(batch.obs, state, batch.first)
                vec.send(batch.env_ids, action)
                batch = vec.recv()
                running += float(batch.raw_reward[0])
                for frame in frames:
                    write(frame)
                count += len(frames)
                frames.clear()
                if batch.game_over[0] and not batch.faulty[0]:
                    returns.append(running)
                running = 0.0 if batch.game_over[0] or batch.faulty[0] else running
    return Recording(path, count, rate, tuple(returns))
