"""What backends share whose environments write to rows: sending, receiving, lost environments, and saved states."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from corral.core import seeding
from corral.core.errors import UserError
from corral.core.types import Array, StepBatch, Tree
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.in_flight import InFlight
from corral.envs.stepping.pending_faults import PendingFaults
from corral.envs.stepping.rows import EnvRows
from corral.envs.supervision import FaultLog, Supervision
from corral.envs.vec_env import VecEnv

POLL_S = 0.25


class RowVecEnv(VecEnv):
    """VecEnv whose environments have rows."""

    _log: FaultLog
    _role: str
    _rows: EnvRows
    _in_flight: InFlight
    _seed = 0  # of the last reset

    @property
    def shows_masks(self) -> bool:
        return super().shows_masks or self._rows.shows_masks

    def state_dict(self) -> dict[str, Any]:
        """State of the rows; the backend adds that of the environments."""
        self._in_flight.require_idle()
        return {
            "identity": self._identity(),
            "seed": self._seed,
            "rows": self._rows.state_dict(self._in_flight.all_envs),
            "faults": self._log.state_dict(),
        }

    def _each_seed(self, chosen: IdSet, seeds: int | Sequence[int | None]) -> Sequence[int | None]:
        if not isinstance(seeds, int):
            return seeds
        return [seeding.env_seed(seeds, self._role, env_id, 0) for env_id in chosen.numbers]

    def _load_rows(self, state: dict[str, Any]) -> None:
        """Take over a saved state except the environments, all of which are in flight afterwards."""
        self._in_flight.require_new()
        ours, theirs = self._identity(), state.get("identity", {})
        odd = [key for key in ours if ours[key] != theirs.get(key)]
        if odd:
            raise UserError(
                f"This state was saved from {theirs.get('num_envs')} x {theirs.get('env')}, but this VecEnv has "
                f"{self.num_envs} x {self.spec.name}; they differ in {', '.join(odd)}: create matching environments."
            )
        self._in_flight.start()
        self._seed = state["seed"]
        self._rows.load_state_dict(state["rows"], self._in_flight.all_envs)
        self._log.load_state_dict(state["faults"])

    def _identity(self) -> dict[str, Any]:
        """What a saved state must share with the environments it is loaded into."""
        return {
            "env": self.spec.name,
            "num_envs": self.num_envs,
            "observation": self.spec.observation.digest,
            "action": self.spec.action.digest,
        }


class AsyncVecEnv(RowVecEnv):
    """VecEnv whose environments step elsewhere and may be lost there; results are handled while it waits for them."""

    pipelined = True
    _supervision: Supervision
    _pending: PendingFaults
    _lock: AbstractContextManager[Any]  # of what it shares with other threads

    @abstractmethod
    def _dispatch(self, chosen: IdSet, actions: list[Array]) -> None:
        """Step these environments with these leaves of actions."""

    @abstractmethod
    def _wait(self, wait_for_all: bool, timeout_s: float) -> None:
        """Wait for a bounded time and handle what arrives; `wait_for_all`: the caller needs all results."""

    @abstractmethod
    def _start_due(self) -> None:
        """Start the next episodes of lost environments that have a place again."""

    def send(self, env_ids: Array, actions: Tree) -> None:
        with self._lock:
            chosen, leaves = self._in_flight.send(env_ids, actions)
            try:
                if self._pending.any_pending:
                    alive = self._pending.deliver(chosen.ids)
                    if not len(alive):
                        return
                    leaves = [leaf[np.isin(chosen.ids, alive)] for leaf in leaves]
                    chosen = self._in_flight.sets.of(alive)
                self._rows.flip(chosen)
                self._dispatch(chosen, leaves)
            except BaseException:  # Ctrl-C in the middle would leave rows that nothing steps
                self.close()
                raise

    def recv(self, min_ready: int | None = None, *, env_ids: Array | None = None) -> StepBatch:
        """Wait for results; environments that are lost meanwhile are replaced."""
        in_flight = self._in_flight
        if not in_flight.started:
            self.reset(self.seed)
        wanted, count = in_flight.wanted(min_ready, env_ids)
        wait_for_all = min_ready is None and env_ids is None
        try:
            while in_flight.num_ready(wanted) < count:
                self._wait(wait_for_all, POLL_S)
        except BaseException:
            self.close()
            raise
        with self._lock:
            batch = self._rows.collect(in_flight.take(wanted))
            if self._pending.any_pending:
                self._start_due()
        return batch

    def linger(self, min_ready: int, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while self._in_flight.num_ready(None) < min_ready and (left := until - time.monotonic()) > 0:
            self._pump(min(left, POLL_S))
        return self._in_flight.num_ready(None) >= min_ready

    def _pump(self, timeout_s: float = POLL_S) -> None:
        """Wait for a bounded time and handle what arrives; an error closes this VecEnv."""
        try:
            self._wait(False, timeout_s)
        except BaseException:
            self.close()
            raise

    def _report_lost(self, ids: Array, culprit: int, kind: str, reason: str) -> None:
        """Report environments that were lost together, because of one of them."""
        self._log.record(self._rows.fault(culprit, kind, reason, self._in_flight.in_flight >> culprit & 1))
        for env_id in ids[ids != culprit].tolist():
            later = self._in_flight.in_flight >> env_id & 1
            self._log.record(self._rows.fault(env_id, "neighbour", f"environment {culprit}", later))
