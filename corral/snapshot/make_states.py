"""Chooses the kind of `States` for environments in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corral.core.errors import UserError
from corral.core.gym_env import layers
from corral.core.types import EnvSpec
from corral.snapshot.array_states import ArrayStates, has_rows
from corral.snapshot.env_states import EnvStates
from corral.snapshot.keepers.choose import RULE_PRESERVING
from corral.snapshot.live_env import LiveEnv
from corral.snapshot.scratch_env import MakeEnv
from corral.snapshot.states import States


def make_states(spec: EnvSpec, envs: Sequence[LiveEnv], makers: Sequence[MakeEnv], memory_mb: float) -> States:
    """`ArrayStates` for an `ArrayModel`, else states kept by a StateKeeper; `makers` build one like each of `envs`."""
    env = envs[0].env
    base: Any = env.unwrapped
    *wrappers, _ = layers(env)
    odd = [layer for layer in wrappers if not isinstance(layer, RULE_PRESERVING)]
    if odd and getattr(base, "players", 1) > 1:
        raise UserError(
            f"A search of {spec.name} uses the game's rules, which {type(odd[0]).__name__} changes: remove that "
            "wrapper."
        )
    if has_rows(env):
        return ArrayStates(base.rows, spec, envs, memory_mb)
    return EnvStates(spec, envs, makers, memory_mb)
