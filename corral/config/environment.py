"""Environments as text: how `config.yaml` stores an environment, and how it is built again."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.core.errors import UserError

if TYPE_CHECKING:
    from corral.envs.resolve import EnvLike

_PIXELS = "corral.envs.suites:pixels"


def describe_env(env: EnvLike) -> tuple[str, dict[str, Any], Any]:
    """Name and kwargs from which `find_env` rebuilds the environment, and the callable if they are not enough."""
    from corral.envs.resolve import resolve
    from corral.envs.suites.atari import AtariSuite
    from corral.envs.suites.pixels import PixelSuite

    if isinstance(env, str):
        return env, {}, None
    name = resolve(env).name
    if isinstance(env, AtariSuite):
        return f"ALE/{env.name}-v5", _options(env, but="game"), None
    if isinstance(env, PixelSuite):
        inner, kwargs, live = describe_env(env.env)
        if live is None and not kwargs:
            return _PIXELS, _options(env, but="env") | {"env": inner}, None
        return f"<{name}>", {}, env
    module, own_name = getattr(env, "__module__", None), getattr(env, "__name__", "")
    if module not in (None, "__main__") and getattr(sys.modules.get(module), own_name, None) is env:
        return f"{module}:{own_name}", {}, None
    return f"<{name.strip('<>')}>", {}, env


def find_env(env: str, env_kwargs: dict[str, Any], factory: Any = None) -> tuple[EnvLike, dict[str, Any]]:
    """The environment and keyword arguments for `make_vec`; UserError if there is none."""
    from corral.envs import suites
    from corral.envs.backends.simulators.options import check_options, is_url
    from corral.envs.resolve import resolve
    from corral.envs.suites.atari import is_atari_id

    if factory is not None:
        return factory, env_kwargs
    if env.startswith("<"):
        raise UserError(
            f"The environment of this run is {env}, a callable without an importable name, which cannot be rebuilt: "
            "give it as env to corral.resume, corral.evaluate or corral.record, or train with module:Class."
        )
    if is_atari_id(env):
        return suites.atari(env, **env_kwargs), {}
    if env == _PIXELS:
        try:
            return suites.pixels(**env_kwargs), {}
        except TypeError as error:
            raise UserError(f"{env}: {error}.") from error
    if is_url(env):
        check_options(env, env_kwargs)
    else:
        resolve(env, env_kwargs)
    return env, env_kwargs


def folder_name(env: str, env_kwargs: Mapping[str, Any]) -> str:
    """The environment in the name of a run's folder; for external simulators, the program or else the address."""
    from corral.envs.backends.simulators.options import is_url

    if is_url(env):
        program = str(env_kwargs.get("sim", "")).split()[:1]
        name = Path(program[0]).name if program else env
    else:
        name = env.rpartition(":")[2]
    return re.sub(r"[^\w.-]+", "-", name).strip("-")


def _options(suite: Any, but: str) -> dict[str, Any]:
    return {key: value for key, value in vars(suite).items() if value != getattr(type(suite), key, {}) and key != but}
