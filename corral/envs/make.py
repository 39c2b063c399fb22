"""`make_vec`: build a VecEnv from an environment's name, factory or URL."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from corral.core.errors import UserError
from corral.core.machine import cores as available
from corral.core.seeding import ROLES
from corral.envs import auto
from corral.envs.backends.local import LocalVecEnv
from corral.envs.backends.native.choose import native_vec_env
from corral.envs.backends.process.vec_env import ProcessVecEnv
from corral.envs.backends.ray.vec_env import RayVecEnv
from corral.envs.backends.simulators.options import external_vec_env, is_url
from corral.envs.backends.vector import VectorVecEnv
from corral.envs.resolve import EnvLike, Resolved, resolve
from corral.envs.supervision import Supervision
from corral.envs.vec_env import VecEnv
from corral.snapshot.rng import seed_spaces

log = logging.getLogger("corral.envs")

_MAX_ENVS = 1 << 17  # more, by a typing error, would use up the memory
BACKENDS = ("auto", "local", "process", "native", "ray")


def make_vec(  # noqa: PLR0913 - what environments, how many, where, and how
    env: EnvLike | Sequence[EnvLike] | gymnasium.vector.VectorEnv[Any, Any, Any],
    num_envs: int = 8,
    backend: str = "auto",
    workers: int | None = None,
    seed: int = 0,
    info: Sequence[str] = (),
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    supervision: Supervision | None = None,
    role: str = "train",
    cores: int | None = None,
) -> VecEnv:
    """Make many environments that step at once; `recv` returns their first observations.

    Args:
        env: a Gymnasium id, `module:Class`, a factory, a list of factories (one per environment), a suite such as
            `corral.envs.suites.atari("Pong")`, a ready-made `gymnasium.vector.VectorEnv`, or URLs of external
            simulators, `tcp://HOST:PORT` or `zmq://HOST:PORT`, separated by commas.
        num_envs: number of environments; ignored for lists and ready-made vector environments.
        backend: `local` (this process), `process` (worker processes), `native` (ALE, EnvPool), `ray` (actors of a Ray
            cluster), or `auto`, which measures a step and chooses; `vec.backend_reason` gives the reason.
        workers: number of worker processes or Ray actors (default: one per core, or chosen by `auto`), or of external
            simulators to wait for.
        seed: run seed, root of the environments' seeds, and of the spaces of `vec.spec` that the environment did not
            seed itself; `vec.reset(seed)` restarts with another.
        info: keys of the environments' infos that batches carry (`StepBatch.info`), e.g. `("is_success",)`. External
            simulators have none.
        env_kwargs: keyword arguments for the environment.
        supervision: deadlines and restart budget.
        role: branch of the seed tree; evaluation uses "eval" so that it never sees training seeds.
        cores: number of cores to use when `workers` is not given; default: all.
    """
    supervision = supervision or Supervision()
    num_envs, seed = _whole("num_envs", num_envs, 1, _MAX_ENVS), _whole("seed", seed, 0)
    workers = None if workers is None else _whole("workers", workers, 1)
    cores = available() if cores is None else _whole("cores", cores, 1)
    if role not in ROLES:
        raise UserError(f"role={role!r} is not one of {', '.join(ROLES)}.")
    if backend not in BACKENDS:
        raise UserError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}.")
    if is_url(env):
        if backend != "auto":
            raise UserError(f"backend={backend!r} does not apply to {env}, an external simulator: omit it.")
        vec: VecEnv = external_vec_env(env, num_envs, workers, supervision, role, env_kwargs)  # type: ignore[arg-type]
    elif isinstance(env, gymnasium.vector.VectorEnv):
        vec = VectorVecEnv(env, role)
    elif isinstance(env, Sequence) and not isinstance(env, str):
        if backend == "native":
            raise UserError("backend='native' takes one environment, not a list; use 'local', 'process' or 'ray'.")
        vec = _from_factories([resolve(e, env_kwargs) for e in env], backend, workers, cores, supervision, role)
    else:
        vec = _from_env(env, env_kwargs, num_envs, backend, workers, cores, supervision, role)
    vec.seed = seed
    if info:
        _keep_infos(vec, [info] if isinstance(info, str) else list(info))
    if not isinstance(vec, VectorVecEnv):  # whose spaces are the user's own
        seed_spaces(vec.spec, seed, role)
    return vec


def _keep_infos(vec: VecEnv, names: list[str]) -> None:
    try:
        vec.keep_infos(names)
    except BaseException:
        vec.close()
        raise


def _from_env(
    env: EnvLike, env_kwargs: Mapping[str, Any] | None, num_envs: int, backend: str, workers: int | None, cores: int,
    supervision: Supervision, role: str,
) -> VecEnv:  # fmt: skip
    if backend in ("auto", "native"):
        native = native_vec_env(env, env_kwargs, num_envs, workers or cores, role, required=backend == "native")
        if native is not None:
            if backend == "auto":
                native.resolved_backend = "native", workers
            return native
    return _from_factories([resolve(env, env_kwargs)] * num_envs, backend, workers, cores, supervision, role)


def _from_factories(
    resolved: Sequence[Resolved], backend: str, workers: int | None, cores: int, supervision: Supervision, role: str
) -> VecEnv:
    if not resolved:
        raise UserError("An empty list of environments; pass at least one.")
    factories, name, num_envs = [r.factory for r in resolved], resolved[0].name, len(resolved)
    reason, resolved_backend = "", None
    count = min(workers or cores, num_envs)
    if backend == "auto":
        cost = auto.measure(factories[0], name, supervision)
        chosen = auto.choose(cost, num_envs, workers, cores)
        backend, count = chosen.backend, chosen.workers
        resolved_backend = backend, count if backend == "process" else workers
        reason = f"{name}: backend '{backend}'" + (f" with {count} workers" if backend == "process" else "")
        reason += f", because {chosen.why}"
        reason += f"; workers={workers} is not used" if workers and backend == "local" else ""
        log.info("%s", reason)
    if backend == "process":
        vec: VecEnv = ProcessVecEnv(factories, name, supervision, count, role)
    elif backend == "ray":
        if not hasattr(os, "memfd_create"):
            raise UserError("backend='ray' needs Linux: use backend='process', or train inside WSL or a container.")
        vec = RayVecEnv(factories, name, supervision, workers and count, role)
    else:
        vec = LocalVecEnv(factories, name, supervision, role)
    vec.backend_reason, vec.resolved_backend = reason, resolved_backend
    return vec


def _whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name} must be an integer, got {value!r}.") from None
    if number < least:
        raise UserError(f"{name} must be at least {least}, got {value}.")
    if most is not None and number > most:
        raise UserError(f"{name} must be at most {most:,}, got {number:,}.")
    return number
