"""Environments in Ray actors, several in each, on one machine or spread over a cluster.

A step costs a remote call to each actor and its reply, which brings the rows as arrays: small ones with the message,
large ones through Ray's object store. Environments with slow steps get a call each, so that results arrive one by one.
An actor that dies, or whose node is lost, is replaced, on another node if need be.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

from corral.core.errors import EnvFailed
from corral.core.gym_env import EnvFactory
from corral.core.types import Array
from corral.envs.backends.ray.actor import ActorReply, EnvActor, NodePlace, inspect_actor
from corral.envs.backends.remote import messages as msg
from corral.envs.backends.remote.vec_env import RemoteVecEnv, RemoteWorker
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.rows import CopiedRows, pack, unpack
from corral.envs.supervision import IDLE, Supervision
from corral.runtimes.ray_cluster import connect, describe_free_cpus, import_ray, reserve_cpus, usable_cpus

log = logging.getLogger("corral.envs")

_PLACE_S = 10.0  # usually it takes Ray a second
_GET_S, _INSPECT_S = 10.0, 5.0
_MAX_CHARACTERS = 1000  # characters of Ray's own report


class RayWorker(RemoteWorker):
    """One actor and the environments it owns."""

    def __init__(self, index: int, ids: Array, job: bytes, group: Any, cpus: float):
        """`group` has CPUs for each worker (see `ray_cluster.reserve_cpus`); None: this worker reserves none."""
        super().__init__(index, ids)
        self._job, self._group, self._cpus = job, group, cpus
        self.actor: Any = None

    def spawn(self) -> None:
        ray = import_ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where: Any = "SPREAD"
        if self._group is not None:
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self.index)
        cpus = 0 if self._group is None else self._cpus
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
            mark, stacks = ray.get(task.remote(self.place), timeout=_INSPECT_S)
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


class RayVecEnv(RemoteVecEnv[RayWorker]):
    """VecEnv over Ray actors. Each reserves so many CPUs; those of an evaluation, which run rarely, reserve none."""

    def __init__(
        self,
        factories: Sequence[EnvFactory],
        name: str,
        supervision: Supervision,
        workers: int | None = None,
        role: str = "train",
        cpus: float = 1.0,
    ):
        connect()
        self._ray = import_ray()
        workers = workers or usable_cpus(len(factories), cpus)
        super().__init__(len(factories), name, supervision, workers, role)
        jobs = self._jobs(factories, workers)
        what = f"{name} with workers={workers}" + (f" and worker_cpus={cpus:g}" if cpus != 1 else "")
        group = reserve_cpus(workers, what, cpus) if role == "train" else None
        # Independent of self, so that an unclosed VecEnv ends its actors when collected or at exit.
        self._stop = weakref.finalize(self, stop_actors, self._workers, group, os.getpid())
        self._start_all([RayWorker(index, ids, job, group, cpus) for index, ids, job in jobs])

    @property
    def places(self) -> list[NodePlace | None]:
        """Node and process of each actor; environment `i` runs in actor `i % len(places)`."""
        return [worker.place for worker in self._workers]

    def _dispatch(self, chosen: IdSet, actions: list[Array]) -> None:
        self._rows.write_actions(chosen, actions)
        owner = self._worker_of[chosen.ids]
        for worker in self._workers:
            mine = chosen.ids[owner == worker.index]
            if not len(mine):
                continue
            if worker.pending == 0:
                worker.heartbeat()
            worker.pending += len(mine)
            for part in _parts(mine, one_by_one=worker.slow):
                ids = self._in_flight.sets.of(part)
                worker.step(ids.payload, list(ids.numbers), [leaf[part] for leaf in self._rows.action])
            self._last_sent = worker

    def _send_reset(
        self, worker: RayWorker, ids: Array, *, lenient: bool, whole: bool = False, begin: bytes | None = None
    ) -> None:
        """One call for each environment: resets may take long."""
        if begin is not None:
            super()._send_reset(worker, ids, lenient=lenient, whole=whole, begin=begin)
            return
        for k, part in enumerate(_parts(ids, one_by_one=True)):
            super()._send_reset(worker, part, lenient=lenient, whole=whole and k == 0)

    def _post(self, worker: RayWorker, op: int, job: Any) -> None:
        if op == msg.LOAD:  # with the rows, which the actor compares with
            worker.load(job, pack(self._rows, self._in_flight.sets.of(worker.ids)))
        else:
            worker.post(op, job)

    def _receive(self, last: RayWorker | None, wait_s: float) -> None:
        refs = [ref for worker in self._workers for ref in worker.calls]
        if not refs:
            time.sleep(wait_s)
            return
        if last is None:  # whichever is first
            self._ray.wait(refs, num_returns=1, timeout=wait_s)
            wait_s = 0
        done = set(self._ray.wait(refs, num_returns=len(refs), timeout=wait_s)[0])
        del refs
        for worker in self._workers:
            for ref in [ref for ref in worker.calls if ref in done]:
                if not self._take_answer(worker, ref):
                    break

    def _take_answer(self, worker: RayWorker, ref: Any) -> bool:
        """Handle an answer and drop it; returns whether the actor is still the same."""
        try:
            answer = self._ray.get(ref, timeout=_GET_S)
        except self._ray.exceptions.RayError as error:
            worker.died(error)
            if self._allocated:
                self._rows.mark[worker.index] = next(iter(worker.suspects), IDLE)
            self._replace(worker, "killed")
            return False
        del worker.calls[ref]
        if isinstance(answer, NodePlace):
            worker.place = answer
            worker.heartbeat()
            return True
        assert isinstance(answer, ActorReply)
        if answer.slow is not None:
            worker.slow = answer.slow
        starts = worker.starts
        for op, data in answer.messages:
            if op in (msg.READY, msg.ROWS):
                chosen = self._in_flight.sets.of_payload(data.env_ids)
                unpack(self._rows, chosen, data)
                if op == msg.READY:
                    self._ready(worker, chosen)
            else:
                self._handle(worker, op, data)
        return worker.starts == starts

    def _check_alive(self, worker: RayWorker, now: float) -> None:
        waited, limit = now - worker.busy_since, self._supervision.start_timeout_s
        if worker.place is None:
            self._check_placed(worker, waited)
            return
        if worker.running:
            if worker.pending == 0:
                return
            restoring = worker.index in self._asked
            limit = limit * len(worker.ids) if restoring else self._supervision.step_timeout_s
        else:  # no message comes before all are built
            limit *= len(worker.ids)
        if waited <= limit:
            return
        mark = worker.inspect()
        if len(worker.suspects) > 1 and mark != worker.last_mark:  # it makes progress, or this was the first look
            worker.last_mark = mark
            worker.heartbeat()
            return
        if waited <= self._supervision.limit_s(mark):
            return
        if self._allocated:
            self._rows.mark[worker.index] = next(iter(worker.suspects), IDLE) if mark == IDLE else mark
        self._replace(worker, "hung", f"no result for {limit:g} s, so ")

    def _check_placed(self, worker: RayWorker, waited: float) -> None:
        """Warn and wait for a while: the CPU is reserved, but after a node is lost another must have one free."""
        if waited <= _PLACE_S:
            return
        names = f"the actor of environments {worker.ids.tolist()[:16]} of {self._name}"
        if waited > self._supervision.start_timeout_s:
            raise EnvFailed(f"Ray did not start {names} in {waited:.0f} s: {describe_free_cpus()}.")
        if not worker.missed:
            worker.missed = True
            log.warning("Ray has not started %s after %.0f s: %s.", names, waited, describe_free_cpus())


def _parts(ids: Array, *, one_by_one: bool) -> list[Array]:
    return [ids[k : k + 1] for k in range(len(ids))] if one_by_one else [ids]
