"""Trajectories as nested dicts of arrays, for checkpoints."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from corral.types import EnvSpec, Trajectory

_TREES = ("obs", "final_obs", "action")


def pack(traj: Trajectory, spec: EnvSpec) -> dict[str, Any]:
    """A trajectory as a dict of arrays and dicts of arrays."""
    packed: dict[str, Any] = {f.name: getattr(traj, f.name) for f in fields(Trajectory)}
    for name in _TREES:
        layout = spec.action if name == "action" else spec.observation
        packed[name] = {str(i): leaf for i, leaf in enumerate(layout.flatten(packed[name]))}
    return packed


def unpack(packed: dict[str, Any], spec: EnvSpec) -> Trajectory:
    """The trajectory that `pack` was given."""
    packed = dict(packed)
    for name in _TREES:
        layout = spec.action if name == "action" else spec.observation
        packed[name] = layout.unflatten([packed[name][str(i)] for i in range(len(layout.leaves))])
    return Trajectory(**packed)
