"""What the adapters to Gymnasium and SB3 do with environments where they live, by `VecEnv.apply`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from corral.core.errors import UserError
from corral.core.gym_env import Env, layers
from corral.core.types import Array

if TYPE_CHECKING:
    from corral.envs.vec_env import VecEnv

_OWN = ("step", "reset", "close")


def call(vec: VecEnv, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], ids: Array) -> list[Any]:
    """Call a method of each environment, or read an attribute that is none; UserError for what the VecEnv does."""
    if name in _OWN:
        raise UserError(
            f"{name}() of single environments would break the transitions: call {name}() of the vector environment."
        )
    return vec.apply(_call, [(name, args, kwargs)] * len(ids), ids)


def get_attr(vec: VecEnv, name: str, ids: Array) -> list[Any]:
    """An attribute of each environment, or of the first of its wrappers that has it."""
    return vec.apply(_get, [name] * len(ids), ids)


def set_attr(vec: VecEnv, name: str, values: Sequence[Any], ids: Array, *, outermost: bool = False) -> None:
    """Set an attribute at the first wrapper that has it, else of the environment; or always of the last wrapper."""
    if name in _OWN:
        raise UserError(f"{name}() of running environments cannot be replaced: wrap them before corral.make_vec.")
    vec.apply(_set_outermost if outermost else _set, [(name, value) for value in values], ids)


def is_wrapped(vec: VecEnv, wrapper: type[Any], ids: Array) -> list[bool]:
    """Whether each environment has a wrapper of this class."""
    return vec.apply(_is_wrapped, [wrapper] * len(ids), ids)


def render(vec: VecEnv, ids: Array) -> list[Any]:
    """The picture of each environment."""
    return vec.apply(_call, [("render", (), {})] * len(ids), ids)


def describe(vec: VecEnv, first: Array) -> tuple[str | None, dict[str, Any], Any]:
    """Render mode, metadata and spec of the first environment, if the backend gives access to it."""
    if not vec.gives_access:
        return None, {"render_modes": []}, None
    mode, metadata = vec.apply(_describe, env_ids=first)[0]
    try:
        return mode, metadata, vec.apply(_get, ["spec"], first)[0]
    except UserError:  # a spec may hold what cannot be sent
        return mode, metadata, None


def _call(env: Env, what: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Any:
    name, args, kwargs = what
    found = env.get_wrapper_attr(name)
    return found(*args, **kwargs) if callable(found) else found


def _get(env: Env, name: str) -> Any:
    return env.get_wrapper_attr(name)


def _set(env: Env, what: tuple[str, Any]) -> None:
    env.set_wrapper_attr(*what)


def _set_outermost(env: Env, what: tuple[str, Any]) -> None:
    setattr(env, *what)


def _is_wrapped(env: Env, wrapper: type[Any]) -> bool:
    return any(isinstance(layer, wrapper) for layer in layers(env))


def _describe(env: Env, _: None) -> tuple[str | None, dict[str, Any]]:
    return getattr(env, "render_mode", None), dict(env.metadata)
