"""Which environments are in flight, and which of their results are ready: the bookkeeping of a backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from corral.envs.rows import row_index
from corral.errors import UserError
from corral.types import Array, EnvSpec, Tree

IDLE, IN_FLIGHT, READY = 0, 1, 2
_MAX_SETS = 256


@dataclass(slots=True)
class IdSet:
    """A set of environment ids that was checked once: sorted or as given, distinct, in range."""

    ids: Array
    index: slice | Array  # the same rows, as a slice where they are one: cheaper to read and write
    route: Any = field(default=None)  # for the backend: how to reach them


class Flight:
    """State of every environment: idle, in flight, or ready to be received.

    Callers mostly send back the very array of ids that they received, so id sets are kept and recognised by
    identity; each numpy call saved counts when a step costs microseconds.
    """

    def __init__(self, num_envs: int, spec: EnvSpec):
        self.num_envs, self.spec = num_envs, spec
        self.state = np.zeros(num_envs, np.uint8)
        self.started = self.closed = False
        self._by_bytes: dict[bytes, IdSet] = {}
        self._by_identity: dict[int, IdSet] = {}
        self.everyone = self.id_set(np.arange(num_envs))

    def start(self) -> None:
        """All environments take off with a reset."""
        self.require_open()
        self.state[:] = IN_FLIGHT
        self.started = True

    def require_open(self) -> None:
        """UserError after `close`."""
        if self.closed:
            raise UserError("This VecEnv is closed; make a new one with corral.make_vec.")

    def take_off(self, env_ids: Array, actions: Tree) -> tuple[IdSet, list[Array]]:
        """Check a send and note it; returns the id set and the action leaves."""
        if not self.started or self.closed:
            self.require_open()
            raise UserError("Call recv() before the first send(): it brings the first observations.")
        chosen = self.id_set(env_ids)
        if self.state[chosen.index].any():
            waiting = [i for i in chosen.ids.tolist() if self.state[i]][:16]
            raise UserError(f"Environments {waiting} have a result waiting; recv() it before sending again.")
        leaves = self.spec.action.batch(actions, len(chosen.ids))
        self.state[chosen.index] = IN_FLIGHT
        return chosen, leaves

    def wanted(self, min_ready: int | None, env_ids: Array | None) -> tuple[IdSet | None, int]:
        """Which environments a recv waits for (None: any), and how many of them."""
        self.require_open()
        if env_ids is not None:
            chosen = self.id_set(env_ids)
            if not self.state[chosen.index].all():
                raise UserError(f"recv(env_ids) names idle environments: {chosen.ids.tolist()[:16]}; send() first.")
            return chosen, len(chosen.ids)
        count = int(np.count_nonzero(self.state))
        if count == 0:
            raise UserError("recv() has nothing to wait for: send() actions first.")
        if min_ready is None:
            return None, count
        if min_ready < 1:
            raise UserError(f"min_ready must be at least 1, got {min_ready}.")
        return None, min(min_ready, count)

    def num_ready(self, chosen: IdSet | None) -> int:
        """How many of these results are ready."""
        state = self.state if chosen is None else self.state[chosen.index]
        return int(np.count_nonzero(state == READY))

    def land(self, chosen: IdSet | None) -> IdSet:
        """Hand over these results, or all that are ready, sorted by id."""
        if chosen is None:
            ready = self.state == READY
            chosen = self.everyone if ready.all() else self.id_set(np.flatnonzero(ready))
        self.state[chosen.index] = IDLE
        return chosen

    def id_set(self, env_ids: Array) -> IdSet:
        """The checked set for an array of ids."""
        known = self._by_identity.get(id(env_ids))
        if known is not None and known.ids is env_ids:
            return known
        ids = np.asarray(env_ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise UserError(f"env_ids must be a non-empty 1-D integer array, got {env_ids!r}.")
        ids = ids.astype(np.int64)
        known = self._by_bytes.get(ids.tobytes())
        return known if known is not None else self._new_set(ids)

    def _new_set(self, ids: Array) -> IdSet:
        if ids.min() < 0 or ids.max() >= self.num_envs or len(np.unique(ids)) != len(ids):
            raise UserError(f"env_ids must be distinct and in 0..{self.num_envs - 1}, got {ids.tolist()[:16]}.")
        if len(self._by_bytes) >= _MAX_SETS:
            self._by_bytes.clear()
            self._by_identity.clear()
        ids.flags.writeable = False  # recognised by identity, so it must not change under us
        chosen = IdSet(ids, row_index(ids))
        self._by_bytes[ids.tobytes()] = self._by_identity[id(ids)] = chosen
        return chosen
