"""`make_vec`: build a VecEnv from an environment's name, factory or URL."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from corral.core.errors import EnvFailed, UserError
from corral.core.gym_env import EnvFactory
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
from corral.runtimes.ray_cluster import cluster_cpus
from corral.snapshot.rng import seed_spaces

log = logging.getLogger("corral.envs")

_LEAST_CPUS = 0.01  # that an actor reserves
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
    worker_cpus: float | None = None,
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
        info: keys of infos that batches carry (`StepBatch.info`), e.g. `("is_success",)`; simulators have none.
        env_kwargs: keyword arguments for the environment.
        supervision: deadlines and restart budget.
        role: branch of the seed tree; evaluation uses "eval" so that it never sees training seeds.
        cores: number of cores to use when `workers` is not given; default: all.
        worker_cpus: CPUs that each actor reserves on Ray; default: 1, or a share of one where steps wait.
    """
    supervision = supervision or Supervision()
    num_envs, seed = _whole("num_envs", num_envs, 1, _MAX_ENVS), _whole("seed", seed, 0)
    workers = None if workers is None else _whole("workers", workers, 1)
    cores = available() if cores is None else _whole("cores", cores, 1)
    _require_known(role, backend, worker_cpus)
    how = backend, workers, cores, supervision, role, worker_cpus
    if is_url(env):
        if backend != "auto":
            raise UserError(f"backend={backend!r} does not apply to {env}, an external simulator: omit it.")
        vec: VecEnv = external_vec_env(env, num_envs, workers, supervision, role, env_kwargs)  # type: ignore[arg-type]
    elif isinstance(env, gymnasium.vector.VectorEnv):
        vec = VectorVecEnv(env, role)
    elif isinstance(env, Sequence) and not isinstance(env, str):
        if backend == "native":
            raise UserError("backend='native' takes one environment, not a list; use 'local', 'process' or 'ray'.")
        vec = _from_factories([resolve(e, env_kwargs) for e in env], *how)
    elif (native := _native(env, env_kwargs, num_envs, backend, workers, cores, role)) is not None:
        vec = native
    else:
        vec = _from_factories([resolve(env, env_kwargs)] * num_envs, *how)
    vec.seed = seed
    if info:
        _keep_infos(vec, [info] if isinstance(info, str) else list(info))
    if not isinstance(vec, VectorVecEnv):  # whose spaces are the user's own
        seed_spaces(vec.spec, seed, role)
    return vec


def _require_known(role: str, backend: str, worker_cpus: float | None) -> None:
    if role not in ROLES:
        raise UserError(f"role={role!r} is not one of {', '.join(ROLES)}.")
    if backend not in BACKENDS:
        raise UserError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}.")
    if worker_cpus is not None and (backend != "ray" or not 0 < worker_cpus < float("inf")):
        raise UserError(f"worker_cpus is a positive number, for backend='ray' only: got {worker_cpus!r}.")


def _keep_infos(vec: VecEnv, names: list[str]) -> None:
    try:
        vec.keep_infos(names)
    except BaseException:
        vec.close()
        raise


def _native(
    env: EnvLike, env_kwargs: Mapping[str, Any] | None, num_envs: int, backend: str, workers: int | None, cores: int,
    role: str,
) -> VecEnv | None:  # fmt: skip
    if backend not in ("auto", "native"):
        return None
    native = native_vec_env(env, env_kwargs, num_envs, workers or cores, role, required=backend == "native")
    if native is not None and backend == "auto":
        native.resolved_backend = "native", workers
    return native


def _wait(
    vec: ProcessVecEnv | RayVecEnv, factory: EnvFactory, name: str, supervision: Supervision
) -> auto.StepCost | None:
    """The cost of a step if it mostly waits for something; measured in a worker, which an environment may end."""
    try:
        (cost,) = vec.apply(partial(auto.measure_in_worker, factory, name, supervision), env_ids=np.zeros(1, int))
    except EnvFailed:
        return None
    return cost if auto.waits(cost) else None


def _from_factories(
    resolved: Sequence[Resolved], backend: str, workers: int | None, cores: int, supervision: Supervision, role: str,
    worker_cpus: float | None,
) -> VecEnv:  # fmt: skip
    if not resolved:
        raise UserError("An empty list of environments; pass at least one.")
    factories, name, num_envs = [r.factory for r in resolved], resolved[0].name, len(resolved)
    if backend == "process":
        return _processes(factories, name, supervision, workers, cores, role)
    if backend == "ray":
        return _ray_actors(factories, name, supervision, workers, role, worker_cpus)
    if backend == "local":
        return LocalVecEnv(factories, name, supervision, role)
    chosen = auto.choose(auto.measure(factories[0], name, supervision), num_envs, workers, cores)
    in_workers = chosen.backend == "process"
    reason = f"{name}: backend '{chosen.backend}'" + (f" with {chosen.workers} workers" if in_workers else "")
    reason += f", because {chosen.why}" + (f"; workers={workers} is not used" if workers and not in_workers else "")
    log.info("%s", reason)
    if in_workers:
        vec: VecEnv = ProcessVecEnv(factories, name, supervision, chosen.workers, role)
    else:
        vec = LocalVecEnv(factories, name, supervision, role)
    vec.backend_reason, vec.resolved_backend = reason, (chosen.backend, chosen.workers if in_workers else workers)
    return vec


def _processes(
    factories: Sequence[EnvFactory], name: str, supervision: Supervision, workers: int | None, cores: int, role: str
) -> ProcessVecEnv:
    """As many workers as cores or, if steps wait, as environments."""
    most = len(factories)
    vec = ProcessVecEnv(factories, name, supervision, min(workers or cores, most), role)
    if workers or cores >= most or (cost := _wait(vec, factories[0], name, supervision)) is None:
        return vec
    vec.close()
    vec = ProcessVecEnv(factories, name, supervision, most, role)
    vec.backend_reason = f"{name}: {most} workers, because {auto.describe_wait(cost)}, and they wait at the same time"
    vec.resolved_backend = "process", most
    log.info("%s", vec.backend_reason)
    return vec


def _ray_actors(
    factories: Sequence[EnvFactory], name: str, supervision: Supervision, workers: int | None, role: str,
    cpus: float | None,
) -> RayVecEnv:  # fmt: skip
    """As many actors as free CPUs or, if steps wait, as environments, each with its share of them."""
    if not hasattr(os, "memfd_create"):
        raise UserError("backend='ray' needs Linux: use backend='process', or train inside WSL or a container.")
    most = len(factories)
    count = min(workers, most) if workers else None
    vec = RayVecEnv(factories, name, supervision, count, role, cpus or 1.0)
    if workers or cpus or len(vec.places) >= most or (cost := _wait(vec, factories[0], name, supervision)) is None:
        return vec
    vec.close()
    share = max(_LEAST_CPUS, min(cost.cpu_s / cost.wall_s, cluster_cpus() / (2 * most)))
    vec = RayVecEnv(factories, name, supervision, most, role, round(share, 2))
    vec.backend_reason = (
        f"{name}: {most} actors with {share:.2f} CPUs each, because {auto.describe_wait(cost)}, and they wait at the "
        "same time; worker_cpus sets another share"
    )
    log.info("%s", vec.backend_reason)
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
