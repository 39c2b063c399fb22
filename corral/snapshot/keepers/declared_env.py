"""States that environments declare: what they say of themselves, by functions of their own.

`state_dict()` and `load_state_dict(state)` are about the whole state; `get_key_state()` and `set_key_state(state)`
about what its author thinks enough to go on from. The outermost wrapper that has them is asked, or the environment
inside where nothing but Gymnasium's time limit and checks is around it.
"""

from __future__ import annotations

from typing import Any

from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from corral.snapshot.rng import Env, State, layers

WHOLE, KEY = ("state_dict", "load_state_dict"), ("get_key_state", "set_key_state")
_TRANSPARENT = (TimeLimit, OrderEnforcing, PassiveEnvChecker)


class NotDeclared(Exception):
    """This environment has no such functions."""


def declares(env: Env, names: tuple[str, str] = WHOLE) -> bool:
    """Whether it has both functions."""
    return _owner(env, names) is not None


def read_declared(env: Env, names: tuple[str, str] = WHOLE) -> State:
    """What an environment says of itself, and Gymnasium's time limits around it."""
    owner = _owner(env, names)
    if owner is None:
        raise NotDeclared
    limits = [layer._elapsed_steps for layer in layers(env) if isinstance(layer, TimeLimit)]
    return {"state": getattr(owner, names[0])(), "elapsed": limits if owner is not env else []}


def write_declared(env: Env, state: State, seed: int | None, names: tuple[str, str] = WHOLE) -> None:
    """Give an environment what `read_declared` read, after a reset with this seed, if there is one."""
    owner = _owner(env, names)
    if owner is None:
        raise NotDeclared
    if seed is not None:
        env.reset(seed=seed)
    getattr(owner, names[1])(state["state"])
    limits = [layer for layer in layers(env) if isinstance(layer, TimeLimit)]
    for layer, elapsed in zip(limits, state["elapsed"], strict=False):
        layer._elapsed_steps = elapsed


def _owner(env: Env, names: tuple[str, str]) -> Any:
    for layer in layers(env):
        if all(callable(getattr(layer, name, None)) for name in names):
            return layer
        if not isinstance(layer, _TRANSPARENT):
            return None
    return None
