"""Building one environment, and what it must look like."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium

from corral.core.errors import UserError
from corral.core.types import EnvSpec

EnvFactory = Callable[[], "gymnasium.Env[Any, Any]"]


def build_env(factory: EnvFactory, name: str) -> tuple[gymnasium.Env[Any, Any], EnvSpec]:
    """Build one environment; UserError when it is none, or has spaces that Corral cannot do."""
    env = factory()
    if not isinstance(env, gymnasium.Env):
        raise UserError(
            f"The factory of {name} returned {type(env).__module__}.{type(env).__name__}, not a gymnasium.Env; "
            "return the environment from it."
        )
    for what in ("observation_space", "action_space"):
        if not isinstance(getattr(env, what, None), gymnasium.Space):
            raise UserError(f"{name} has no {what}; set one in its __init__.")
    limit = env.spec.max_episode_steps if env.spec is not None else None
    # Copies: who samples from the spec's spaces shall not change what the environment draws from its own.
    spec = EnvSpec(copy.deepcopy(env.observation_space), copy.deepcopy(env.action_space), name, limit)
    for layout in (spec.observation, spec.action):
        if not layout.leaves:
            raise UserError(f"{name} has an empty space, {layout.space}; give it at least one leaf.")
    return env, spec


def unpack_step(result: Any, name: str) -> tuple[Any, Any, Any, Any, Any]:
    """The five values of a step; UserError when they are not five."""
    if isinstance(result, tuple) and len(result) == 5:
        return result
    raise UserError(
        f"{name}: step() must return (obs, reward, terminated, truncated, info); environments of the old gym "
        "interface need gymnasium's conversion wrapper first."
    )


def require_same_spaces(a: EnvSpec, a_id: int, b: EnvSpec, b_id: int) -> None:
    """UserError, naming the difference, unless two environments can share a batch."""
    for what, left, right in (
        ("observation", a.observation, b.observation),
        ("action", a.action, b.action),
    ):
        if left != right:
            raise UserError(
                f"Environments {a_id} and {b_id} have different {what} spaces, {left.space} and {right.space}; "
                "all environments of one VecEnv need the same spaces."
            )


def seeded_reset(env: gymnasium.Env[Any, Any], seed: int) -> tuple[Any, Any]:
    """First observation and info of a seeded episode; UserError when reset() is of the old interface."""
    result = env.reset(seed=seed)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise UserError(f"{type(env.unwrapped).__name__}.reset() must return (obs, info), got {type(result).__name__}.")
    return result
