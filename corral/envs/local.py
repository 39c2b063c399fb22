"""Environments in this process, stepped one after the other: the fastest choice for cheap environments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from corral.envs.contract import VecEnv
from corral.envs.flight import READY, Flight
from corral.envs.group import EnvFactory, EnvGroup
from corral.envs.rows import Rows
from corral.envs.supervise import IDLE, Fault, FaultLog, Supervision, Watchdog
from corral.types import Array, StepBatch, Tree


class LocalVecEnv(VecEnv):
    """VecEnv without processes. Environments step inside `recv`, in the order they were sent to."""

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
        self._rows = Rows(self.spec, self.num_envs)
        self._group.attach(self._rows)
        self._flight = Flight(self.num_envs, self.spec)
        self._queue: list[Array] = []  # ids sent to and not yet stepped, in order
        self._watchdog = Watchdog(self._mark, supervision.step_timeout_s)

    @property
    def faults(self) -> Iterable[Fault]:
        """The most recent failures of environments."""
        return tuple(self._log.recent)

    @property
    def restarts(self) -> int:
        """How many times an environment was restarted."""
        return self._log.restarts

    def reset(self, seed: int = 0) -> None:
        """Start new seeded episodes everywhere."""
        lenient = self._flight.started  # the very first reset that fails is the user's mistake, a later one a fault
        self._flight.start()
        self._queue.clear()
        self._rows.phase ^= 1
        self._rows.episode[:] = 0
        self._watchdog.touch()
        with self._closing_on_error():
            self._group.reset(self._flight.everyone.ids, seed, self._role, lenient=lenient)
        self._flight.state[:] = READY

    def send(self, env_ids: Array, actions: Tree) -> None:
        """Queue one action for each of these idle environments."""
        chosen, leaves = self._flight.take_off(env_ids, actions)
        for row, leaf in zip(self._rows.action, leaves, strict=True):
            row[chosen.index] = leaf
        self._rows.phase[chosen.index] ^= 1
        self._queue.append(chosen.ids)

    def recv(self, min_ready: int | None = None, *, env_ids: Array | None = None) -> StepBatch:
        """Step as many queued environments as the caller waits for, and return them."""
        flight = self._flight
        if not flight.started:
            self.reset(self.seed)
        wanted, count = flight.wanted(min_ready, env_ids)
        if self._queue:
            due = self._due(max(0, count - flight.num_ready(None))) if wanted is None else self._named(wanted.ids)
            if len(due):
                self._watchdog.touch()
                with self._closing_on_error():
                    self._group.step(due, self._announce)
        chosen = flight.land(wanted)
        return self._rows.collect(chosen.ids, chosen.index)

    def close(self) -> None:
        """Close every environment."""
        if not self._flight.closed:
            self._flight.closed = True
            self._watchdog.close()
            self._group.close()

    def _announce(self, ids: Array) -> None:
        self._flight.state[ids] = READY

    def _due(self, count: int) -> Array:
        """Take the first `count` environments from the queue."""
        if len(self._queue) == 1 and len(self._queue[0]) == count:
            return self._queue.pop()
        queued = np.concatenate(self._queue)
        self._queue = [queued[count:]] if count < len(queued) else []
        return queued[:count]

    def _named(self, ids: Array) -> Array:
        """Take these environments from the queue."""
        if len(self._queue) == 1 and self._queue[0] is ids:  # id sets are kept, so this is the usual case
            return self._queue.pop()
        queued = np.concatenate(self._queue)
        named = np.isin(queued, ids)
        self._queue = [] if named.all() else [queued[~named]]
        return queued[named]

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise
