"""Wrappers that show or record an environment: no part of its state, and nothing for a planner's environment to do.

A planner's copy of Gymnasium's RecordVideo would draw every step that is only thought of, keep its frames in every
state, and write them over the video of what was really done.
"""

from __future__ import annotations

from typing import Any

from gymnasium.wrappers import HumanRendering, RecordVideo, RenderCollection

from corral.snapshot.rng import Env, layers

_LOOKING = (HumanRendering, RecordVideo, RenderCollection)


def is_looking(layer: Any) -> bool:
    """Whether a layer is such a wrapper."""
    return isinstance(layer, _LOOKING)


def hide(env: Env) -> None:
    """Let an environment open no window, and its wrappers draw and record nothing."""
    base = env.unwrapped
    if getattr(base, "render_mode", None) == "human":
        base.render_mode = None
    for layer in layers(env):
        if is_looking(layer):
            layer.step, layer.reset = layer.env.step, layer.env.reset
        if isinstance(layer, RecordVideo):  # what it was copied from may record; closing this one would write that
            layer.recording, layer.recorded_frames = False, []
