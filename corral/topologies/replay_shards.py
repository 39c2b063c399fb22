"""A replay buffer in several processes: each stores its environments' data, and batches come from any that has one."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from corral.core import seeding
from corral.core.encoding import Value
from corral.core.errors import RunFailed
from corral.core.types import Array, DataSpec, EnvSpec, Sample, Trajectory, slice_envs
from corral.data.make import make_store
from corral.data.pack import pack, unpack, unpack_batch
from corral.data.store import START, Store, StoreContext
from corral.runtimes.base import Mailbox, RoleLost, Runtime
from corral.runtimes.supervised_role import SupervisedRole
from corral.topologies.base import role_factory

_AHEAD = 2  # batches fetched in advance
_MAX_PUTS = 4  # fragments in flight to a shard
_STATE_S = 300.0  # to save or load a shard


class Shard:
    """The role that holds one shard of the replay buffer."""

    def __init__(
        self, spec: dict[str, Any], data: dict[str, Any], num_envs: int, seed: int, index: int, start: int,
        mailbox: Mailbox,
    ):  # fmt: skip
        self._spec = EnvSpec.from_json(spec)
        own_seed = seeding.component_seed(seed, "train", "store", index, start)
        self._store = make_store(self._spec, DataSpec(**data), num_envs, own_seed)

    def put(self, traj: Value, priorities: Value, progress: float, reward_scale: float) -> Value:
        """Store a fragment; returns the shard's status."""
        self._store.put(unpack(traj, self._spec), priorities, StoreContext(progress, reward_scale))
        return self._shard_status()

    def get(self) -> Value:
        if not self._store.ready():
            return {"batch": None, **self._shard_status()}
        sample = self._store.get()
        return {"batch": pack(sample.batch, self._spec), "keys": sample.keys, **self._shard_status()}

    def feedback(self, keys: Array, priorities: Array) -> Value:
        self._store.feedback(keys, priorities)
        return None

    def state_dict(self) -> Value:
        return copy.deepcopy(self._store.state_dict())

    def load_state_dict(self, state: Value) -> Value:
        self._store.load_state_dict(state)
        return self._shard_status()

    def _shard_status(self) -> dict[str, Any]:
        metrics = self._store.metrics()
        return {
            "room": self._store.room(),
            "ready": self._store.ready(),
            "counts": [int(metrics[f"store/{name}"]) for name in ("inserted", "sampled", "size")],
        }


class ShardedStore(Store):
    """A replay store made of remote shards.

    A lost shard restarts empty, and the fragments that it had not acknowledged are sent again. Batches come from the
    others meanwhile, but no fragment is taken: `room` is false until all shards run.
    """

    def __init__(
        self, runtime: Runtime, spec: EnvSpec, data: DataSpec, num_envs: int, shards: int, seed: int,
        max_restarts: int, note: Callable[[str, str], None],
    ):  # fmt: skip
        self._runtime, self._spec, self._data = runtime, spec, data
        share = replace(
            data, capacity=-(-data.capacity // shards), min_size=max(data.batch_size, -(-data.min_size // shards))
        )
        args = spec.to_json(), asdict(share), num_envs, seed
        self._shards = [
            SupervisedRole(runtime, f"replay {k}", role_factory(Shard, *args, k), note, max_restarts)
            for k in range(shards)
        ]
        self._shard_status: list[dict[str, Any]] = [{} for _ in range(shards)]
        self._unacknowledged: list[deque[tuple[Value, ...]]] = [deque() for _ in range(shards)]  # puts, oldest first
        self._lost_counts = np.zeros(2, np.int64)  # of shards that were lost
        self._ready: deque[tuple[int, int, Value]] = deque()  # shard, its number of starts, its answer
        self._keys: deque[tuple[int, int]] = deque(maxlen=64)

    @property
    def members(self) -> list[SupervisedRole]:
        return self._shards

    def put(self, traj: Trajectory, priorities: Array | None = None, ctx: StoreContext = START) -> None:
        """Always send an environment's data to the same shard, because n-step windows span fragments."""
        owner = traj.env_id % len(self._shards)
        for k, member in enumerate(self._shards):
            columns = np.flatnonzero(owner == k)
            if len(columns):
                part = slice_envs(traj, columns) if len(columns) < len(owner) else traj
                first = None if priorities is None else priorities[:, columns]
                self._unacknowledged[k].append((pack(part, self._spec), first, ctx.progress, ctx.reward_scale))
                if member.alive:
                    member.call("put", *self._unacknowledged[k][-1])
        self._pump(0.0)

    def room(self) -> bool:
        self._pump(0.0)
        return all(
            member.alive and status.get("room", True) and len(puts) < _MAX_PUTS
            for member, status, puts in zip(self._shards, self._shard_status, self._unacknowledged, strict=True)
        )

    def ready(self) -> bool:
        self._pump(0.0)
        return bool(self._ready)

    def get(self) -> Sample:
        if not self._ready:
            raise RunFailed("No shard has sent a batch yet: call get() only after ready() returned true.")
        shard, start, answer = self._ready.popleft()
        self._keys.append((shard, start))
        self._pump(0.0)
        return Sample(unpack_batch(answer["batch"], self._spec), answer["keys"])

    def feedback(self, keys: Array | None, priorities: Array) -> None:
        shard, start = self._keys[-1]
        member = self._shards[shard]
        if keys is not None and member.alive and member.restarts == start:
            member.call("feedback", np.asarray(keys), np.asarray(priorities))

    def _pump(self, timeout_s: float) -> None:
        """Receive answers, restart lost shards, and request batches that are due."""
        calls = [member.calls[0] for member in self._shards if member.calls]
        if calls:
            self._runtime.wait(calls, timeout_s)
        for k, member in enumerate(self._shards):
            while member.calls and member.calls[0].done:
                call = member.calls.popleft()
                try:
                    self._take(k, call.method, call.result())
                except RoleLost as lost:
                    self._lost_counts += self._shard_status[k].get("counts", [0, 0, 0])[:2]
                    self._shard_status[k] = {}
                    member.mark_lost(str(lost))
            if member.given_up:
                raise RunFailed(f"{member.name} exceeded max_restarts; the run's events.jsonl lists the causes.")
            if member.restart_if_due():
                for put in self._unacknowledged[k]:
                    member.call("put", *put)
            if member.alive and self._shard_status[k].get("ready"):
                requested = sum(call.method == "get" for call in member.calls)
                if requested + sum(shard == k for shard, *_ in self._ready) < _AHEAD:
                    member.call("get")

    def _take(self, shard: int, method: str, answer: Value) -> None:
        if method == "put":
            self._unacknowledged[shard].popleft()
        if method in ("put", "get", "load_state_dict"):
            self._shard_status[shard] = {key: answer[key] for key in ("room", "ready", "counts")}
        if method == "get" and answer["batch"] is not None:
            self._ready.append((shard, self._shards[shard].restarts, answer))

    def metrics(self) -> dict[str, float]:
        counts = np.array([status.get("counts", [0, 0, 0]) for status in self._shard_status]).sum(0)
        return {
            "store/size": float(counts[2]),
            "store/inserted": float(counts[0] + self._lost_counts[0]),
            "store/sampled": float(counts[1] + self._lost_counts[1]),
            "store/shards": float(sum(member.alive for member in self._shards)),
        }

    def state_dict(self) -> dict[str, Any]:
        """The shards' states; None for a lost shard."""
        return {"shards": {str(k): self._ask(k, "state_dict") for k in range(len(self._shards))}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["shards"]) != len(self._shards):
            raise RunFailed(f"This run had {len(state['shards'])} replay shards: resume it with the same number.")
        for k in range(len(self._shards)):
            if state["shards"][str(k)] is not None:
                self._shard_status[k] = self._ask(k, "load_state_dict", state["shards"][str(k)]) or {}

    def _ask(self, shard: int, method: str, *args: Value) -> Value:
        """Wait for the answer to a call, after earlier ones; None if the shard is lost."""
        member, until = self._shards[shard], time.monotonic() + _STATE_S
        if not member.alive:
            return None
        member.call(method, *args)
        asked = member.calls[-1]
        while not asked.done and time.monotonic() < until:
            self._runtime.wait([asked], 1.0)
        try:
            while member.calls and member.calls[0] is not asked:
                call = member.calls.popleft()
                self._take(shard, call.method, call.result())
            return asked.result()
        except RoleLost:
            return None
        finally:
            if asked in member.calls:
                member.calls.remove(asked)
