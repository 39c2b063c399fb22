"""Which environment has which slot of which simulator, which should move to balance the load, and how long to wait."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass, field

import numpy as np

from corral.core.errors import EnvFailed, UserError
from corral.core.types import Array
from corral.envs.stepping.id_set import IdSet, IdSets
from corral.link.address import parse_url
from corral.link.client.fleet import Fleet
from corral.link.client.session import SimulatorSession

_NONE = -1
_SLOT = np.dtype("<u4")
_MAX_CACHED = 1024
# Only a clear imbalance moves environments; noise would keep them moving.
_CLEARLY = 1.25
_BALANCE_S = 5.0
_WORTH_S = 1e-3  # faster steps of all environments are not worth moving any


@dataclass(frozen=True)
class EnvSlots:
    """The slots of some environments, and the observations they delivered last."""

    sessions: list[SimulatorSession]
    which: Array  # [n], index into the sessions
    slots: Array  # [n] uint32, of that session
    obs: list[Array]  # [n, ...] leaves
    to_play: Array  # [n] int8
    lost: Array  # [n] bool, whose simulator and episode are lost


@dataclass
class SlotBatch:
    """Environments in one simulator, and their slots in wire format."""

    session: SimulatorSession
    chosen: IdSet
    slots: bytes
    _chunks: dict[int, list[SlotBatch]] = field(default_factory=dict)

    def chunks(self, max_rows: int, sets: IdSets) -> list[SlotBatch]:
        if len(self.chosen) <= max_rows:
            return [self]
        if max_rows not in self._chunks:
            self._chunks.clear()
            ids, width = self.chosen.ids, _SLOT.itemsize
            self._chunks[max_rows] = [
                SlotBatch(self.session, sets.of(ids[k : k + max_rows]), self.slots[width * k : width * (k + max_rows)])
                for k in range(0, len(ids), max_rows)
            ]
        return self._chunks[max_rows]


class SlotTable:
    """Slots of `num_envs` environments. Several VecEnvs may share a fleet; sessions know which slots are free."""

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self._session_of = np.full(num_envs, _NONE, np.int64)
        self._slot_of = np.zeros(num_envs, _SLOT)
        self._sessions: dict[int, SimulatorSession] = {}
        self._cache: dict[bytes, list[SlotBatch]] = {}
        self.unplaced = num_envs  # number of environments without a slot

    def placed(self, ids: Array) -> Array:
        flags: Array = self._session_of[ids] != _NONE
        return flags

    def by_simulator(self, chosen: IdSet, sets: IdSets) -> list[SlotBatch]:
        """These environments by simulator; cached, because the same sets recur."""
        known = self._cache.get(chosen.payload)
        if known is None:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            numbers = self._session_of[chosen.ids]
            known = []
            for number in dict.fromkeys(numbers.tolist()):
                ids = chosen.ids[numbers == number]
                known.append(SlotBatch(self._sessions[number], sets.of(ids), self._slot_of[ids].tobytes()))
            self._cache[chosen.payload] = known
        return known

    def find(self, ids: Array) -> tuple[list[SimulatorSession], Array, Array]:
        """Slots of environments that all have one: the simulators, each environment's index among them, its slot."""
        numbers, which = np.unique(self._session_of[ids], return_inverse=True)
        return [self._sessions[number] for number in numbers.tolist()], which, self._slot_of[ids]

    def fill(self, sessions: list[SimulatorSession]) -> None:
        """Give environments without a slot one, where the load is lightest."""
        self.replace(np.flatnonzero(self._session_of == _NONE).tolist(), sessions)

    def leave(self, session: SimulatorSession) -> Array:
        """Remove a lost simulator; returns its environments."""
        ids = np.flatnonzero(self._session_of == session.number)
        self._session_of[ids] = _NONE
        self._sessions.pop(session.number, None)
        self._invalidate_cache()
        return ids

    def leave_all(self, but: Array) -> None:
        """Free all slots for other VecEnvs of the fleet, except those of `but`, which are in requests."""
        self.leave_some(np.flatnonzero((self._session_of != _NONE) & ~but))

    def leave_some(self, ids: Array) -> None:
        for env_id in ids.tolist():
            self._leave(env_id)
        self._invalidate_cache()

    def surplus(self, sessions: list[SimulatorSession]) -> list[int]:
        """Environments to move so that step times are balanced across simulators."""
        movers: list[int] = []
        for session in sessions:
            if session.retiring:
                movers += np.flatnonzero(self._session_of == session.number).tolist()
        staying = [session for session in sessions if not session.retiring]
        counts = {session.number: int(np.count_nonzero(self._session_of == session.number)) for session in staying}
        total, speed = sum(counts.values()), _speeds(staying)
        room = sum(session.room for session in staying)
        for session in staying:
            fair = total * speed[session.number] / sum(speed.values())
            extra = counts[session.number] - int(np.ceil(fair))
            extra = min(extra, room - session.room)
            if extra > 0 and counts[session.number] > _CLEARLY * fair:
                movers += np.flatnonzero(self._session_of == session.number)[-extra:].tolist()
        return movers

    def longest_s(self) -> float:
        """Time of a step of all environments in the slowest simulator, as measured there."""
        each = (np.count_nonzero(self._session_of == s.number) * s.row_s for s in self._sessions.values())
        return max(each, default=0.0)

    def replace(self, ids: list[int], sessions: list[SimulatorSession]) -> list[int]:
        """Give these other slots, where a step with one more is fastest, while there are any; returns who got one."""
        speed, moved = _speeds(sessions), []
        for env_id in ids:
            if not any(session.has_room for session in sessions):
                break  # the simulator that they should move to is not there yet, or is gone again
            self._leave(env_id)
            room = [session for session in sessions if session.has_room]
            lightest = min(room, key=lambda session: (session.used_slots + 1) / speed[session.number])
            self._session_of[env_id], self._slot_of[env_id] = lightest.number, lightest.take_slot()
            self._sessions[lightest.number] = lightest
            moved.append(env_id)
        self._invalidate_cache()
        return moved

    def _leave(self, env_id: int) -> None:
        session = self._sessions.get(int(self._session_of[env_id]))
        if session is not None:
            session.free_slot(int(self._slot_of[env_id]))
        self._session_of[env_id] = _NONE

    def _invalidate_cache(self) -> None:
        self._cache.clear()
        self.unplaced = int(np.count_nonzero(self._session_of == _NONE))


def _speeds(sessions: list[SimulatorSession]) -> dict[int, float]:
    """Rows per second of each simulator; the mean of the others for one that was not measured."""
    known = [1.0 / session.row_s for session in sessions if session.row_s > 0]
    if not known:
        return {session.number: float(session.simulator.hello.threads) for session in sessions}
    mean = sum(known) / len(known)
    return {session.number: 1.0 / session.row_s if session.row_s > 0 else mean for session in sessions}


class Rebalancer:
    """Chooses environments that move when their episode ends, so that all simulators take equally long for a step."""

    def __init__(self, table: SlotTable):
        self._table, self._at = table, time.monotonic() + _BALANCE_S
        self.moving: dict[int, None] = {}  # environments that move when their episode ends

    def plan(self, sessions: list[SimulatorSession]) -> None:
        self.moving = dict.fromkeys(self._table.surplus(sessions))

    def check(self, sessions: list[SimulatorSession]) -> None:
        """Every few seconds, check whether simulators are slower or faster than their share of the load."""
        now = time.monotonic()
        if now > self._at:
            self._at = now + _BALANCE_S
            if self._table.longest_s() > _WORTH_S:
                self.plan(sessions)

    def move(self, ended: list[int], sessions: list[SimulatorSession]) -> list[int]:
        """Give environments that should move other slots while there are any; returns those that have one."""
        movers = self._table.replace([env_id for env_id in ended if env_id in self.moving], sessions)
        self.forget(movers)
        return movers

    def forget(self, ids: list[int]) -> None:
        for env_id in ids:
            self.moving.pop(env_id, None)


log = logging.getLogger("corral.link")

_POLL_S = 0.25
_REPORT_S = 5.0  # report longer waits


class SlotTimeouts:
    """Waits for simulators, logs a long wait once, and raises EnvFailed after the timeout."""

    def __init__(self, fleet: Fleet, timeout_s: float):
        self._fleet, self._timeout_s = fleet, timeout_s
        self._since: float | None = None
        self._warned = self._lent = False

    def gather(self, wanted: int) -> None:
        while (there := len(self._fleet.sessions)) < wanted:
            self._wait(f"Only {there} of {wanted} simulators are connected at {self._where}")
            self._fleet.poll(_POLL_S)
        self._since = None

    def require_slots(self, count: int) -> None:
        slots = sum(session.simulator.hello.slots for session in self._fleet.sessions.values())
        if slots < count:
            raise UserError(
                f"{self._where} runs at most {slots} environments, and {count} are requested: start it with "
                f"--envs {count}, or set num_envs={slots}."
            )

    def wait_for_slot(self) -> None:
        """Wait for a moment; EnvFailed after the timeout."""
        self._wait(
            f"All slots of the simulators at {self._where} are in use, and evaluation needs one",
            "start them with more --envs, or set eval_episodes=0",
        )
        self._fleet.poll(_POLL_S)

    def note_lent(self, count: int) -> None:
        if not self._lent:
            log.warning(
                "The simulators at %s have no free slots: evaluation takes those of %d training environments, whose "
                "episodes end early; start simulators with more --envs to avoid it.", self._where, count,
            )  # fmt: skip
        self._lent = True

    def check(self, unplaced: int) -> None:
        if unplaced:
            self._wait(f"{unplaced} environments have no simulator at {self._where}")
        else:
            self._since = None

    @property
    def _where(self) -> str:
        return ", ".join(self._fleet.binding.urls)

    def _wait(self, problem: str, remedy: str = "start them, or give make_vec a longer start_timeout_s") -> None:
        now = time.monotonic()
        if self._since is None:
            self._since, self._warned = now, False
        waited = now - self._since
        if waited > self._timeout_s:
            raise EnvFailed(f"{problem}{self._unknown_hosts()} after {waited:.0f} s; {remedy}.")
        if waited > _REPORT_S and not self._warned:
            self._warned = True
            left = self._timeout_s - waited
            log.warning("%s%s; waiting for more, for up to %.0f s.", problem, self._unknown_hosts(), left)

    def _unknown_hosts(self) -> str:
        """The hosts that DNS does not know, which it may later, to be appended to a problem."""
        unknown = []
        for url in self._fleet.binding.urls:
            address = parse_url(url)
            try:
                socket.getaddrinfo(address.bind_host, address.port)
            except OSError:
                unknown.append(address.host)
        return f" (there is no host named {', '.join(unknown)})" if unknown else ""
