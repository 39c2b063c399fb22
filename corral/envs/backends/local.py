"""Environments in this process, stepped one after the other: fastest for cheap environments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from corral.core.gym_env import EnvFactory
from corral.core.types import Array, StepBatch, Tree
from corral.envs.backends.row_vec_env import RowVecEnv
from corral.envs.stepping.group import EnvGroup
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.in_flight import InFlight
from corral.envs.stepping.live_row import RowEnv
from corral.envs.stepping.row_infos import RowInfos
from corral.envs.stepping.rows import EnvRows
from corral.envs.supervision import IDLE, FaultLog, Supervision, Watchdog
from corral.snapshot.keepers.choose import make_scratch
from corral.snapshot.live_env import LiveEnv
from corral.snapshot.states import States


class LocalVecEnv(RowVecEnv):
    """VecEnv without processes. Environments step inside `recv`, in the order of their actions."""

    gives_access = True

    def __init__(self, factories: Sequence[EnvFactory], name: str, supervision: Supervision, role: str = "train"):
        self.num_envs, self._role = len(factories), role
        self._log = FaultLog(supervision)
        self._mark = [IDLE]
        self._group = EnvGroup(dict(enumerate(factories)), name, self._log.record, self._mark)
        try:
            self.spec = self._group.build()
        except BaseException:
            self._group.close()
            raise
        self._rows = EnvRows(self.spec, self.num_envs)
        self._in_flight = InFlight(self.num_envs, self.spec)
        self._group.attach(self._rows, self._in_flight.sets)
        self._queue: list[IdSet] = []  # actions sent, not yet stepped, in order
        self._watchdog = Watchdog(self._mark, supervision)

    def environment(self, env_id: int) -> gymnasium.Env[Any, Any]:
        return self._group.envs[env_id]

    def live_env(self, env_id: int) -> LiveEnv:
        return RowEnv(self._group, env_id)

    def states(self, memory_mb: float = 1024.0) -> States:
        factories = list(self._group.factories.values())
        makers = {id(factory): partial(make_scratch, factory) for factory in factories}
        live = [self.live_env(i) for i in range(self.num_envs)]
        from corral.snapshot.make_states import make_states  # compiles code, so imported only when needed

        return make_states(self.spec, live, [makers[id(factory)] for factory in factories], memory_mb)

    def reset(self, seed: int = 0) -> None:
        in_flight = self._in_flight
        lenient = in_flight.started  # a failing first reset is the user's mistake, a later one a fault
        in_flight.start()
        self._seed = seed
        self._queue.clear()
        self._rows.flip(in_flight.all_envs)
        self._rows.episode[:] = 0
        self._watchdog.touch()
        try:
            self._group.reset(in_flight.all_envs.ids, seed, self._role, lenient=lenient)
        except BaseException:
            self.close()
            raise
        in_flight.complete(in_flight.all_envs.mask)

    def begin_episodes(
        self, env_ids: Array, seeds: int | Sequence[int | None], options: Sequence[Mapping[str, Any] | None]
    ) -> None:
        chosen = self._in_flight.begin(env_ids)
        seeds = self._each_seed(chosen, seeds)
        self._rows.flip(chosen)
        self._rows.episode[chosen.ids] += 1
        self._watchdog.touch()
        try:
            self._group.begin(chosen.numbers, seeds, options)
        except BaseException:
            self.close()
            raise
        self._in_flight.complete(chosen.mask)

    def apply(
        self, function: Callable[[Any, Any], Any], values: Iterable[Any] = (), env_ids: Array | None = None
    ) -> list[Any]:
        self._in_flight.require_none_waiting("A call of the environments")
        ids = self._in_flight.all_envs.ids if env_ids is None else self._in_flight.sets.of(env_ids).ids
        values = list(values) or [None] * len(ids)
        envs = self._group.envs
        return [function(envs[env_id], value) for env_id, value in zip(ids.tolist(), values, strict=True)]

    def keep_infos(self, names: Sequence[str]) -> None:
        self._rows.infos = RowInfos(names)

    def send(self, env_ids: Array, actions: Tree) -> None:
        chosen, leaves = self._in_flight.send(env_ids, actions)
        self._rows.write_actions(chosen, leaves)
        self._rows.flip(chosen)
        self._queue.append(chosen)

    def recv(self, min_ready: int | None = None, *, env_ids: Array | None = None) -> StepBatch:
        in_flight = self._in_flight
        if not in_flight.started:
            self.reset(self.seed)
        wanted, count = in_flight.wanted(min_ready, env_ids)
        due = self._due(count - in_flight.num_ready(None)) if wanted is None else self._named(wanted)
        if due is not None:
            self._watchdog.touch()
            try:
                self._group.step(due, lambda done: in_flight.complete(done.mask))
            except BaseException:
                self.close()
                raise
        return self._rows.collect(in_flight.take(wanted))

    def record_episodes(self) -> None:
        self._group.record()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"envs": self._group.save()}

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        self._load_rows(state)
        self._watchdog.touch()
        try:
            restarted = self._group.load(state["envs"], self._seed, self._role, self._watchdog.touch)
        except BaseException:
            self.close()
            raise
        self._in_flight.complete(sum(1 << env_id for env_id in restarted))
        self._in_flight.in_flight = 0
        return restarted

    def close(self) -> None:
        if not self._in_flight.closed:
            self._in_flight.closed = True
            self._watchdog.close()
            self._group.close()
            self._log.close()

    def _due(self, count: int) -> IdSet | None:
        if count <= 0:
            return None
        if len(self._queue) == 1 and len(self._queue[0]) == count:  # the usual case
            return self._queue.pop()
        queued = np.concatenate([chosen.ids for chosen in self._queue])
        self._queue = [self._in_flight.sets.of(queued[count:])] if count < len(queued) else []
        return self._in_flight.sets.of(queued[:count])

    def _named(self, wanted: IdSet) -> IdSet | None:
        """Take these environments from the queue, unless they have already been stepped."""
        if len(self._queue) == 1 and self._queue[0] is wanted:  # the usual case
            return self._queue.pop()
        if not self._queue:
            return None
        queued = np.concatenate([chosen.ids for chosen in self._queue])
        named = np.isin(queued, wanted.ids)
        self._queue = [] if named.all() else [self._in_flight.sets.of(queued[~named])]
        return self._in_flight.sets.of(queued[named]) if named.any() else None
