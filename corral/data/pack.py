"""Batches as nested dicts of arrays, for checkpoints and messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from corral.core.types import EnvSpec, Positions, Trajectory, Transitions

_OBSERVATIONS, _ACTIONS = ("obs", "next_obs", "final_obs"), ("action",)


def pack(batch: Trajectory | Transitions | Positions, spec: EnvSpec) -> dict[str, Any]:
    """A batch as a dict of arrays and dicts of arrays."""
    packed: dict[str, Any] = {f.name: getattr(batch, f.name) for f in fields(batch)}
    for name, layout in _trees(packed, spec):
        packed[name] = {str(i): leaf for i, leaf in enumerate(layout.flatten(packed[name]))}
    return packed


def unpack(packed: dict[str, Any], spec: EnvSpec) -> Trajectory:
    """Inverse of `pack` for a trajectory."""
    return Trajectory(**_unpacked(packed, spec))


def pack_all(parts: Iterable[Trajectory], spec: EnvSpec) -> dict[str, Any]:
    """Trajectories by their number."""
    return {str(i): pack(part, spec) for i, part in enumerate(parts)}


def unpack_all(packed: dict[str, Any], spec: EnvSpec) -> list[Trajectory]:
    """Inverse of `pack_all`."""
    return [unpack(packed[str(i)], spec) for i in range(len(packed))]


def unpack_batch(packed: dict[str, Any], spec: EnvSpec) -> Trajectory | Transitions | Positions:
    """Inverse of `pack` for any batch; the fields identify its type."""
    kind = Transitions if "discount" in packed else Positions if "outcome" in packed else Trajectory
    return kind(**_unpacked(packed, spec))


def _unpacked(packed: dict[str, Any], spec: EnvSpec) -> dict[str, Any]:
    packed = dict(packed)
    for name, layout in _trees(packed, spec):
        packed[name] = layout.unflatten([packed[name][str(i)] for i in range(len(layout.leaves))])
    return packed


def _trees(packed: dict[str, Any], spec: EnvSpec) -> list[tuple[str, Any]]:
    """Names and layouts of the fields that may be trees."""
    trees = [(name, spec.observation) for name in _OBSERVATIONS] + [(name, spec.action) for name in _ACTIONS]
    return [(name, layout) for name, layout in trees if name in packed]
