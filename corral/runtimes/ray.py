"""Roles as Ray actors, on any nodes of the cluster. Values travel through Ray's object store."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import cloudpickle

from corral.core.encoding import Value
from corral.runtimes.base import Call, Handle, Mailbox, MakeRole, RoleHost, Runtime
from corral.runtimes.child import THREAD_VARIABLES
from corral.runtimes.ray_cluster import connect, import_ray, require_cpus, reserve_cpus, starts_local_cluster

_GET_S = 60.0  # to fetch a ready value, maybe from another node
_MAX_CHARACTERS = 300  # characters of Ray's own report


@cache
def _host_class() -> Any:
    """The Ray actor around a role: calls in order, mail concurrently."""
    ray = import_ray()

    class Host:
        def __init__(self, job: bytes, path: list[str]):
            sys.path[:] = path + [entry for entry in sys.path if entry not in path]
            self._mailbox, self._job = Mailbox(), job
            self._host: RoleHost | None = None

        def call(self, method: str, *args: Value) -> dict[str, Value]:
            if self._host is None:
                # Ray itself pickles what it starts; this is the same code from the same source.
                self._host = RoleHost(lambda: cloudpickle.loads(self._job)(self._mailbox))
            return self._host.answer(method, args)

        @ray.method(concurrency_group="mail")  # type: ignore[untyped-decorator]
        def mail(self, key: str, value: Value) -> None:
            self._mailbox.put(key, value)

        @ray.method(concurrency_group="mail")  # type: ignore[untyped-decorator]
        def pid(self) -> int:
            return os.getpid()

        def close(self) -> None:
            self._mailbox.close()
            if self._host is not None:
                self._host.close()

    return ray.remote(concurrency_groups={"mail": 1})(Host)


class _RayCall(Call):
    handle: _RayActor

    def __init__(self, handle: _RayActor, method: str, ref: Any):
        super().__init__(handle, method)
        self.ref, self.ready = ref, False

    @property
    def done(self) -> bool:
        if not self.ready and self.handle.alive:
            self.ready = bool(import_ray().wait([self.ref], timeout=0.0)[0])
        return self.ready or not self.handle.alive

    def result(self) -> Value:
        ray = import_ray()
        if self.handle.alive:
            try:
                self.answer = ray.get(self.ref, timeout=_GET_S)
            except ray.exceptions.RayError as error:
                self.handle.mark_lost(str(error))
        return super().result()


class _RayActor(Handle):
    def __init__(self, name: str, make: MakeRole, where: Any):
        self.name = name
        path = [entry for entry in sys.path if isinstance(entry, str)]
        variables = dict.fromkeys(THREAD_VARIABLES, "1")
        options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "runtime_env": {"env_vars": variables}}
        options |= {"num_cpus": 0} if where is None else {"num_cpus": 1, "scheduling_strategy": where}
        self._actor = _host_class().options(**options).remote(cloudpickle.dumps(make), path)
        self._pid_ref = self._actor.pid.remote()
        self._pid: int | None = None

    @property
    def pid(self) -> int | None:
        ray = import_ray()
        if self._pid is None and self.alive and ray.wait([self._pid_ref], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):
                self._pid = ray.get(self._pid_ref)
        return self._pid

    def call(self, method: str, *args: Value) -> _RayCall:
        ref = self._actor.call.remote(method, *args) if self.alive else None
        return _RayCall(self, method, ref)

    def send_mail(self, key: str, value: Value) -> None:
        if self.alive:
            self._actor.mail.remote(key, value)

    def mark_lost(self, why: str) -> None:
        if self.alive:
            report = " ".join(why.split())[:_MAX_CHARACTERS]
            self.lost = f"{self.name} was lost: {report}"
            with contextlib.suppress(Exception):  # Ray itself may be gone
                import_ray().kill(self._actor)

    def stop(self, timeout_s: float = 5.0) -> None:
        if self.alive and timeout_s > 0:
            ray = import_ray()
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._actor.close.remote(), timeout=timeout_s)
        self.mark_lost("it was stopped")


class RayRuntime(Runtime):
    """Ray actors, a CPU each; joins the cluster of `RAY_ADDRESS`, or starts one on this machine that ends with it."""

    def __init__(self) -> None:
        ray = import_ray()
        self._own = not ray.is_initialized()
        self.is_local = self._own and starts_local_cluster()
        connect()
        # Arrays from the object store are read-only; trajectories are never written to, so torch need not warn.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.host = ray.util.get_node_ip_address()
        self._handles: list[_RayActor] = []
        self._places: dict[str, int] = {}
        self._group: Any = None

    def reserve(self, count: int, what: str, extra_processes: int = 0) -> None:
        require_cpus(count + extra_processes, what)
        self._group = reserve_cpus(count, what)

    def spawn(self, name: str, make: MakeRole) -> Handle:
        where = None
        if self._group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            place = self._places.setdefault(name, len(self._places))
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        handle = _RayActor(name, make, where)
        self._handles[:] = [h for h in self._handles if h.alive] + [handle]
        return handle

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        wanted = [call for call in calls if isinstance(call, _RayCall)]
        gone = [call for call in wanted if not call.handle.alive]
        refs = {call.ref: call for call in wanted if call.handle.alive}
        if not gone and refs:
            import_ray().wait(list(refs), num_returns=1, timeout=timeout_s)
        if refs:
            for ref in import_ray().wait(list(refs), num_returns=len(refs), timeout=0)[0]:
                refs[ref].ready = True
        return [call for call in wanted if call.ready or not call.handle.alive]

    def share(self, value: Value) -> Value:
        return import_ray().put(value)

    def close(self) -> None:
        ray = import_ray()
        if not ray.is_initialized():
            return
        closing = [(h, h._actor.close.remote()) for h in self._handles if h.alive]
        if closing:
            ray.wait([ref for _, ref in closing], num_returns=len(closing), timeout=5.0)
        for handle, _ in closing:
            handle.mark_lost("it was stopped")
        self._handles.clear()
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
            self._group = None
        if self._own:
            ray.shutdown()
