"""Ray: join the cluster that `RAY_ADDRESS` names, or start one on this machine, and query its resources.

Ray lets a request for missing resources wait forever; `require_cpus` reports at once what is missing.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from typing import Any

from corral.core.errors import RunFailed, UserError
from corral.core.machine import cores

_REACH_S = 3.0
_RESERVE_S = 2
_SETTLE_S = 1.0  # nodes that are just joining, and CPUs that were just freed, show up this late


def import_ray() -> Any:
    """The ray package; UserError when it is not installed."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise UserError("Ray is not installed: pip install 'corral-rl[ray]'.") from error


def connect(address: str | None = None) -> None:
    """Make Ray usable in this process; does nothing when it already is.

    `address`, or else the environment variable RAY_ADDRESS, names a cluster to join: `host:port` of its head, or `auto`
    for the one on this machine. Without either, a cluster of this machine's cores is started, which ends with this
    process.
    """
    ray = import_ray()
    if ray.is_initialized():
        return
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        try:
            ray.init(address="local", num_cpus=cores(), include_dashboard=False, **quiet)
        except Exception as error:  # Ray raises plain ones
            raise RunFailed(
                f"Ray did not start on this machine ({' '.join(str(error).split())[:200]}); if it is only busy, try "
                "again, or start it with `ray start --head` and set RAY_ADDRESS=auto."
            ) from error
        return
    if address != "auto":
        _require_reachable(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"Cannot join the Ray cluster at {address} ({error}); start one with `ray start --head`, or unset "
            "RAY_ADDRESS to run on this machine alone."
        ) from error


def starts_local_cluster() -> bool:
    """Whether `connect` would start a cluster on this machine."""
    return os.environ.get("RAY_ADDRESS", "local") in ("", "local")


def require_local_cpus(count: int, what: str) -> None:
    """UserError, before Ray is started here, when this machine has fewer cores than `what` needs."""
    if starts_local_cluster() and not import_ray().is_initialized() and count > cores():
        raise UserError(
            f"{what} needs {count} CPUs and this machine has {cores()}: ask for fewer, or start a cluster of several "
            "machines with `ray start --head` and set RAY_ADDRESS."
        )


def require_cpus(count: float, what: str) -> None:
    """UserError, with the remedy, when `what` needs more CPUs than the whole cluster has."""
    until = time.monotonic() + _SETTLE_S
    while (total := _cpus("cluster_resources")) < count:
        if time.monotonic() > until:
            raise UserError(
                f"{what} needs {count:g} CPUs and the Ray cluster has {total:g}: ask for at most {int(total)}, or add "
                "nodes with `ray start --address=<head>:6379`."
            )
        time.sleep(0.1)


def usable_cpus(most: int, each: float = 1.0) -> int:
    """How many times so many CPUs are free, at least 1 and at most `most`."""
    until = time.monotonic() + _SETTLE_S
    most = min(most, int(_cpus("cluster_resources") / each))
    while (free := int(_cpus("available_resources") / each)) < most and time.monotonic() < until:
        time.sleep(0.1)
    return max(1, min(free, most))


def cluster_cpus() -> float:
    """CPUs of the whole cluster."""
    return _cpus("cluster_resources")


def reserve_cpus(count: int, what: str, each: float = 1.0) -> Any:
    """A placement group of `count` bundles with `each` CPUs, spread over the nodes; UserError within seconds if not.

    Actors in it keep their CPUs until the group is removed, and move with them when a node is lost.
    """
    require_cpus(count * each, what)
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"CPU": each}] * count, strategy="SPREAD")
    if not group.wait(_RESERVE_S):
        remove_placement_group(group)
        raise UserError(f"{what} needs {count * each:g} CPUs on the Ray cluster: {describe_free_cpus()}.")
    return group


def describe_free_cpus() -> str:
    """Number of free CPUs, and what to do when that is too few."""
    return (
        f"{_cpus('available_resources'):g} of its {_cpus('cluster_resources'):g} CPUs are free; stop other programs "
        "there, request fewer CPUs, or add nodes with `ray start --address=<head>:6379`"
    )


def _cpus(which: str) -> float:
    resources: dict[str, float] = getattr(import_ray(), which)()
    return resources.get("CPU", 0.0)


def _require_reachable(address: str) -> None:
    """Ray itself would try for a minute."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACH_S).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"No Ray cluster answers at {address!r} ({error}): give host:port of its head (`ray start --head` prints "
            "it), `auto` for the cluster on this machine, or unset RAY_ADDRESS to start one."
        ) from error
