"""Faulty rows and new episodes that are due after a worker died.

Each of its environments is due one faulty row, unless it only had to start its first episode, and a new episode. A row
in flight is delivered once the new episode is ready; the row of an idle environment when it is next sent to.
"""

from __future__ import annotations

import numpy as np

from corral.core.types import Array
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.in_flight import InFlight
from corral.envs.stepping.rows import EnvRows


class PendingFaults:
    """Tracks environments whose worker died, whose new episode is ready, or which still have to start one."""

    def __init__(self, rows: EnvRows, in_flight: InFlight):
        self._rows, self._in_flight = rows, in_flight
        self.any_pending = False  # whether any environment has a fault or a reset pending; checked in every step
        self.fresh = 0  # mask of environments that have not delivered their first observation yet
        self._lost, self._restarted, self._reset_due, self._flip_due = (
            np.zeros(in_flight.num_envs, np.bool_) for _ in range(4)
        )

    def clear(self) -> None:
        self._lost[:] = self._restarted[:] = self._reset_due[:] = self._flip_due[:] = self.any_pending = False
        self.fresh = self._in_flight.all_envs.mask

    def schedule_reset(self, ids: Array) -> None:
        self._reset_due[ids] = self.any_pending = True

    def schedule_faults(self, ids: Array) -> None:
        in_flight = self._in_flight.is_in_flight(ids)
        waiting = self._in_flight.sets.bools(self.fresh)[ids] & in_flight
        self.schedule_reset(ids)
        newly = ~waiting & ~self._lost[ids]
        # `send` flipped the rows in flight; the others still point to the last observation.
        self._flip_due[ids[newly & ~in_flight]] = True
        self._lost[ids[newly]] = True
        self._restarted[ids] = False
        self._rows.episode[ids[~waiting]] += 1

    def take_resets(self, ids: Array) -> Array:
        """Those of `ids` whose reset is due and whose row holds no undelivered result; marks them as reset."""
        ready = self._in_flight.sets.bools(self._in_flight.ready)[ids]
        due: Array = ids[self._reset_due[ids] & ~ready]
        flip = due[self._flip_due[due]]
        if len(flip):
            self._rows.flip(self._in_flight.sets.of(flip))
        self._rows.step[due] = 0
        self._reset_due[due] = self._flip_due[due] = False
        self._update_any_pending()
        return due

    def complete(self, results: IdSet) -> None:
        """Mark results as ready to be received, or as the new episodes that faulty rows wait for."""
        if self.any_pending:
            ids, lost = results.ids, self._lost[results.ids]
            self._restarted[ids[lost]] = True
            self.deliver(ids[lost & self._in_flight.is_in_flight(ids)])
            if lost.all():
                return
            results = self._in_flight.sets.of(ids[~lost])
        self._in_flight.complete(results.mask)
        self.fresh &= ~results.mask

    def deliver(self, ids: Array) -> Array:
        """Deliver the faulty rows due among `ids`, all in flight; returns the remaining ids."""
        lost = self._lost[ids]
        for env_id in ids[lost & self._restarted[ids]].tolist():
            self._rows.mark_lost(env_id)
            self._in_flight.complete(1 << env_id)
            self._lost[env_id] = self._restarted[env_id] = False
        self._update_any_pending()
        rest: Array = ids[~lost]
        return rest

    def unknown(self) -> list[int]:
        """Environments with a pending fault or reset."""
        return np.flatnonzero(self._lost | self._reset_due).tolist()

    def _update_any_pending(self) -> None:
        self.any_pending = bool(self._lost.any() or self._reset_due.any())
