"""The parent's side of one Ray actor: start it, call it, read how it ended, end it."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from corral.core.types import Array
from corral.envs.backends.ray.actor import EnvActor, NodePlace, inspect_actor
from corral.envs.backends.remote import messages as msg
from corral.envs.backends.remote.handle import RemoteWorker
from corral.envs.stepping.rows import CopiedRows
from corral.envs.supervision import IDLE
from corral.runtimes.ray_cluster import import_ray

_POLL_S = 5.0
_MAX_CHARACTERS = 1000  # characters of Ray's own report


class RayWorker(RemoteWorker):
    """One actor and the environments it owns."""

    def __init__(self, index: int, ids: Array, job: bytes, group: Any):
        """`group` has a CPU for each worker (see `ray_cluster.reserve_cpus`); None: this worker reserves none."""
        super().__init__(index, ids)
        self._job, self._group = job, group
        self.actor: Any = None

    def spawn(self) -> None:
        ray = import_ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where: Any = "SPREAD"
        if self._group is not None:
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self.index)
        cpus = 0 if self._group is None else 1
        options = {"num_cpus": cpus, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": where}
        self.actor = ray.remote(EnvActor).options(**options).remote()
        self.place: NodePlace | None = None
        self.missed = False  # whether a slow start was already reported
        self.slow = True  # until a step shows otherwise: a call for each environment
        self._report = ""
        self.calls: dict[Any, list[int]] = {}  # refs of pending answers, in order, and their environments
        self.reset()
        self.calls[self.actor.place.remote()] = []
        self.calls[self.actor.build.remote(self._job, [entry for entry in sys.path if isinstance(entry, str)])] = []

    def post(self, op: int, data: Any = None) -> None:
        self.calls[self.actor.ask.remote(op, data)] = data["ids"] if op == msg.RESET else []

    def load(self, data: Any, rows: CopiedRows) -> None:
        self.calls[self.actor.ask.remote(msg.LOAD, data, rows)] = self.ids.tolist()

    def step(self, env_ids: bytes, ids: list[int], actions: list[Array]) -> None:
        self.calls[self.actor.take.remote(env_ids, actions)] = ids

    @property
    def suspects(self) -> list[int]:
        """Environments that may be the one being stepped: those of the oldest call."""
        return next((ids for ids in self.calls.values() if ids), [])

    def inspect(self) -> int:
        """Keep the stacks of a hanging actor for its report; returns the environment that it is stepping."""
        ray = import_ray()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self.place is None:
            return IDLE
        there = NodeAffinitySchedulingStrategy(self.place.node_id, soft=False)
        task = ray.remote(inspect_actor).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        try:
            mark, stacks = ray.get(task.remote(self.place), timeout=_POLL_S)
        except (ray.exceptions.RayError, OSError) as error:
            self._report = f"its stack could not be read: {error}"
            return IDLE
        self._report = f"its Ray actor was killed; its stack:\n{stacks}"
        return int(mark)

    def died(self, error: Exception) -> None:
        text = str(error)
        start = max(0, text.find("The actor is dead"))
        self._report = f"its Ray actor died: {text[start : start + _MAX_CHARACTERS]}"

    def exit_report(self) -> str:
        return self._report

    def kill(self) -> None:
        ray = import_ray()
        self.calls.clear()
        with contextlib.suppress(Exception):  # the actor or Ray may be gone already
            ray.kill(self.actor, no_restart=True)


def stop_actors(workers: list[RayWorker], group: Any, owner_pid: int, timeout_s: float = 5.0) -> None:
    """Let every actor close its environments, end it, and free the CPUs; does nothing in a fork or without Ray."""
    ray = import_ray()
    if os.getpid() == owner_pid and ray.is_initialized():
        with contextlib.suppress(Exception):
            refs = [worker.actor.close.remote() for worker in workers]
            ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        for worker in workers:
            worker.kill()
        if group is not None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(group)
    workers.clear()
