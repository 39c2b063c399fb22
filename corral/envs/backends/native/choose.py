"""`backend="native"`: environments that are stepped in C++, by ALE or EnvPool."""

from __future__ import annotations

import difflib
import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

from corral.core.errors import UserError
from corral.envs.suites.atari import AtariSuite, atari, is_atari_id
from corral.envs.vec_env import VecEnv

log = logging.getLogger("corral.envs")


def native_vec_env(
    env: Any, env_kwargs: Mapping[str, Any] | None, num_envs: int, threads: int, role: str, *, required: bool
) -> VecEnv | None:
    """The native form of an environment. If not `required`, only where it equals the Python environment, else None. If
    required, Atari ids mean the standard Atari stack, with `env_kwargs` as its options, and other ids are EnvPool's.
    """
    threads = min(threads, num_envs)
    if isinstance(env, AtariSuite):
        if env_kwargs and not required:
            return None  # the wrappers can render, ALE's vector environment cannot
        if env_kwargs:
            raise UserError(f"backend='native' takes no env_kwargs for {env.name}: pass the options to atari().")
        return _ale(env, num_envs, threads, role)
    if not required:
        return None
    if isinstance(env, str) and is_atari_id(env):
        return _ale(atari(env, **(env_kwargs or {})), num_envs, threads, role)
    if isinstance(env, str) and importlib.util.find_spec("envpool") is not None:
        return _envpool(env, env_kwargs or {}, num_envs, threads, role)
    raise UserError(_cannot(env))


def _ale(suite: AtariSuite, num_envs: int, threads: int, role: str) -> VecEnv:
    from corral.envs.backends.native.ale import AleVecEnv

    vec = AleVecEnv(suite, num_envs, threads, role)
    vec.backend_reason = (
        f"{suite.name}: backend 'native' with {threads} threads, because ALE runs the same stack in C++"
    )
    log.info("%s", vec.backend_reason)
    return vec


def _envpool(task: str, kwargs: Mapping[str, Any], num_envs: int, threads: int, role: str) -> VecEnv:
    import envpool

    from corral.envs.backends.native.envpool import EnvPoolVecEnv

    tasks = envpool.list_all_envs()
    if task not in tasks:
        close = difflib.get_close_matches(task, tasks, 3, 0.6)
        raise UserError(_cannot(task) + (f" Close: {', '.join(close)}." if close else ""))
    if type(envpool.make_spec(task)).__name__ == "AtariEnvSpec":
        return _ale(atari(task, **kwargs), num_envs, threads, role)
    return EnvPoolVecEnv(task, kwargs, num_envs, threads, role)


def _cannot(env: Any) -> str:
    missing = "" if importlib.util.find_spec("envpool") else " (pip install 'corral-rl[envpool]')"
    return (
        f"There is no native form of {env!r}: backend='native' runs corral.envs.suites.atari(...), ids such "
        f"as 'ALE/Pong-v5', and EnvPool's ids{missing}; backend='process' runs anything."
    )
