"""Pixel observations of any environment that can be rendered."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AddRenderObservation, GrayscaleObservation, ResizeObservation

from corral.core.errors import UserError
from corral.core.types import Array
from corral.envs import wrappers

NO_SCREEN = "dummy,offscreen"
"""Drivers of pygame without a screen, whichever it has. Not `dummy` alone, at which highway-env draws black."""


@dataclass(frozen=True)
class PixelSuite:
    """An environment observed by its last `stack` frames, oldest first. Call it to build one; `make_vec` takes it."""

    env: str | Callable[..., gymnasium.Env[Any, Any]]
    size: int = 84
    grayscale: bool = True
    stack: int = 4
    reference_line: bool = False
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        inner = self.env if isinstance(self.env, str) else getattr(self.env, "__qualname__", type(self.env).__name__)
        return f"{inner} in pixels"

    def __call__(self) -> gymnasium.Env[Any, Any]:
        from corral.envs.resolve import resolve

        os.environ.setdefault("SDL_VIDEODRIVER", NO_SCREEN)  # pygame would look for a display
        resolved = resolve(self.env, {**self.env_kwargs, "render_mode": "rgb_array"})
        try:
            return self._wrap(resolved.factory())
        except gymnasium.error.DependencyNotInstalled as error:
            raise UserError(f"{self.name} needs a package: pip install 'corral-rl[pixels]' ({error}).") from error
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{self.name}: {error}; pixels() needs an environment that takes render_mode='rgb_array'."
            ) from error

    def _wrap(self, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        env = AddRenderObservation(env)
        if self.reference_line:
            env = ReferenceLine(env)
        env = ResizeObservation(env, (self.size, self.size))
        if self.grayscale:
            env = GrayscaleObservation(env)
        return wrappers.FrameStack(env, self.stack)


class ReferenceLine(gymnasium.ObservationWrapper[Array, Any, Array]):
    """Draws a red vertical line through the centre, where a frame has the background colour, its top left corner's."""

    def observation(self, observation: Array) -> Array:
        frame = np.array(observation)
        width = frame.shape[1]
        thick = max(1, width // 100)
        left = (width - thick) // 2
        strip = frame[:, left : left + thick]
        strip[(strip == frame[0, 0]).all(axis=-1)] = (255, 0, 0)
        return frame


def pixels(
    env: str | Callable[..., gymnasium.Env[Any, Any]],
    *,
    size: int = 84,
    grayscale: bool = True,
    stack: int = 4,
    reference_line: bool = False,
    env_kwargs: Mapping[str, Any] | None = None,
) -> PixelSuite:
    """Observe an environment through its rendered frames, `[stack, size, size]` or `[..., 3]` in colour.

    Args:
        env: a Gymnasium id, `module:Class`, or a factory that takes `render_mode`.
        size: height and width of the frames.
        grayscale: gray frames instead of coloured ones.
        stack: number of frames in an observation.
        reference_line: draw a vertical line at the centre; CartPole is hard to centre without one.
        env_kwargs: keyword arguments for the environment.
    """
    for name, value in (("size", size), ("stack", stack)):
        if not isinstance(value, int) or value < 1:
            raise UserError(f"pixels({name}) must be an integer of at least 1, got {value!r}.")
    return PixelSuite(env, size, grayscale, stack, reference_line, dict(env_kwargs or {}))
