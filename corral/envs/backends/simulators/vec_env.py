"""External simulators as a VecEnv. Each environment has a slot in a simulator, and gets another when that is lost.

A step costs one message to each simulator and one reply. A lost simulator costs its environments one episode each,
which ends truncated and faulty (see `pending_faults`); they continue in other simulators with free slots, or wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array
from corral.envs.backends.simulators.checkpoint import export_states, import_states
from corral.envs.backends.simulators.replies import QuickSteps
from corral.envs.backends.simulators.requests import RequestingVecEnv
from corral.envs.backends.simulators.slots import EnvSlots, Rebalancer, SlotTable, SlotTimeouts
from corral.envs.stepping.in_flight import InFlight
from corral.envs.stepping.pending_faults import PendingFaults
from corral.envs.stepping.rows import EnvRows
from corral.envs.supervision import FaultLog, Supervision
from corral.link.client.fleet import Fleet, FleetMember
from corral.link.client.session import SimulatorSession

if TYPE_CHECKING:
    from corral.envs.backends.simulators.states import LinkStates


class LinkVecEnv(RequestingVecEnv):
    """VecEnv over the simulators of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        num_envs: int,
        supervision: Supervision,
        role: str,
        *,
        simulators: int,
        elastic: bool,
        release: Callable[[], Any],
        fewer: bool = False,
    ):
        """Wait for `simulators`, take slots; `elastic`: more may join; `fewer`: accept fewer slots than `num_envs`."""
        self._role, self.fleet, self._lock, self._supervision = role, fleet, fleet.lock, supervision
        self._log = FaultLog(supervision)
        self._member = FleetMember(lambda s: me().joined(s), lambda s, kind, reason: me().lost(s, kind, reason))
        me: Any = weakref.ref(self)
        self._stop = weakref.finalize(self, _leave, fleet, self._member, release)
        self._timeouts = SlotTimeouts(fleet, supervision.start_timeout_s)
        try:
            self._timeouts.gather(simulators)
            assert fleet.spec is not None
            self.spec = fleet.spec
            self.num_envs = num_envs = min(num_envs, self._timeouts.wait_for_slot()) if fewer else num_envs
            self._slots, self._requested = SlotTable(num_envs), 0  # mask of environments in requests
            self._rebalancer = Rebalancer(self._slots)
            self._rows = EnvRows(self.spec, num_envs)
            self._in_flight = InFlight(num_envs, self.spec)
            self._pending = PendingFaults(self._rows, self._in_flight)
            self._to_play = np.zeros(num_envs, np.int8)
            self._ended: dict[int, Array] = {}  # rows of ended episodes whose successors have yet to start elsewhere
            self._quick = QuickSteps(self._rows)
            if not elastic:
                self._timeouts.require_slots(num_envs)
            with fleet.lock:
                self._slots.fill(list(fleet.sessions.values()))
                fleet.members.append(self._member)
        except BaseException:
            self._stop()
            raise

    @property
    def urls(self) -> list[str]:
        return self.fleet.binding.urls

    @property
    def players(self) -> int:
        return max((session.simulator.hello.players for session in self.fleet.sessions.values()), default=1)

    def slots_of(self, env_ids: Array) -> EnvSlots:
        """The slots of idle environments, for planning from their states; arbitrary for lost environments."""
        in_flight, rows, chosen = self._in_flight, self._rows, self._in_flight.sets.of(env_ids)
        in_flight.require_open()
        if not in_flight.started or (in_flight.in_flight | in_flight.ready) & chosen.mask:
            raise UserError("Only the states of idle environments are known: recv() their results first.")
        with self.fleet.lock:
            lost = ~self._slots.placed(chosen.ids)
            if self._pending.any_pending:  # some already have a new slot, in which no episode has begun
                lost |= np.isin(chosen.ids, self._pending.unknown())
            where = self._slots.find(chosen.ids[~lost])
            which, slots = np.zeros(len(lost), np.int64), np.zeros(len(lost), np.uint32)
            which[~lost], slots[~lost] = where[1:]
            obs = [leaf.copy() for leaf in rows.current(chosen, rows.half(chosen))]
            return EnvSlots(where[0], which, slots, obs, self._to_play[chosen.ids], lost)

    def states(self, memory_mb: float = 1024.0) -> LinkStates:
        """States inside the simulators; UserError where a simulator keeps none."""
        from corral.envs.backends.simulators.states import LinkStates  # compiles, which few need

        return LinkStates(self, memory_mb)

    def note_moved(self, env_ids: Array, obs: list[Array], to_play: Array) -> None:
        rows = self._rows
        for leaf, value in zip(rows.obs, obs, strict=True):
            leaf[rows.phase[env_ids], env_ids] = value
        self._to_play[env_ids] = to_play

    def reset(self, seed: int = 0) -> None:
        in_flight = self._in_flight
        in_flight.require_open()
        while self._requested:
            self._pump()
        with self.fleet.lock:
            self._seed = seed
            in_flight.start()
            self._pending.clear()
            self._rebalancer.moving.clear()
            self._ended.clear()
            self._rows.flip(in_flight.all_envs)
            self._rows.episode[:] = 0
            placed = self._slots.placed(in_flight.all_envs.ids)
            unplaced = in_flight.all_envs.ids[~placed]
            if len(unplaced):
                self._pending.schedule_reset(unplaced)
            self._reset(in_flight.all_envs.ids[placed])

    def state_dict(self) -> dict[str, Any]:
        """Positions of the environments, with the states of those whose simulators can export them (level 4)."""
        self._quick.count_steps()
        state, ids = super().state_dict(), self._in_flight.all_envs.ids
        return state | {"to_play": self._to_play.copy(), "envs": export_states(self.fleet, ids, self.slots_of(ids))}

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Import the exported states; environments without one start a new episode, and are returned."""
        if "envs" not in state:  # saved before states were exported
            return super().load_state_dict(state)
        self._load_rows(state)
        self._pending.clear()
        self._to_play[:] = state["to_play"]
        ids = self._in_flight.all_envs.ids
        placed = ids[self._slots.placed(ids)]
        restored = import_states(self.fleet, placed, self._slots.find(placed), state["envs"])
        mask = sum(1 << env_id for env_id in restored)
        self._in_flight.in_flight &= ~mask
        self._pending.fresh &= ~mask
        rest = np.setdiff1d(ids, restored)
        with self.fleet.lock:
            self._rows.episode[rest] += 1
            self._pending.schedule_reset(rest)
            self._start_due()
        restarted: list[int] = rest.tolist()
        return restarted

    def close(self) -> None:
        """Leave the simulators; those that no other VecEnv uses are disconnected."""
        if hasattr(self, "_in_flight"):
            with self.fleet.lock:
                self._in_flight.closed = True
                self._free_slots()
        self._stop()

    def joined(self, session: SimulatorSession) -> None:
        self._slots.fill(self._sessions)
        self._start_due()
        self._rebalancer.plan(self._sessions)

    def lost(self, session: SimulatorSession, kind: str, reason: str) -> None:
        """A simulator is lost: its environments end their episodes and get slots in others."""
        ids = self._slots.leave(session)
        if not len(ids):
            return
        self._requested &= ~self._in_flight.sets.of(ids).mask
        if self._in_flight.started:
            stepping = self._in_flight.is_in_flight(ids)
            culprit = int(ids[stepping][0]) if stepping.any() else int(ids[0])
            self._quick.count_steps()
            self._report_lost(ids, culprit, kind, reason)
            self._rebalancer.forget(ids.tolist())
            between = np.isin(ids, list(self._ended))  # two episodes: the row of the last one is complete
            self._pending.schedule_reset(ids[between])
            self._pending.schedule_faults(ids[~between])
        self._slots.fill(self._sessions)
        self._start_due()

    def _wait(self, wait_for_all: bool, timeout_s: float) -> None:
        self.fleet.poll(timeout_s)
        if self._slots.unplaced:  # another VecEnv may have freed slots
            with self.fleet.lock:
                self._slots.fill(self._sessions)
                self._start_due()
        self._timeouts.check(self._slots.unplaced)


def _leave(fleet: Fleet, member: FleetMember, release: Callable[[], Any]) -> None:
    if member in fleet.members:
        fleet.members.remove(member)
    release()
