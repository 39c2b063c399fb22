"""Which environment sits in which slot of which simulator, and who should move to balance the load."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np

from corral.core.errors import EnvFailed
from corral.core.types import Array
from corral.envs.stepping.id_set import IdSet, IdSets
from corral.link.client.fleet import Fleet
from corral.link.client.session import SimulatorSession

_UNSEATED = -1
_SLOT = np.dtype("<u4")
_MAX_CACHED = 1024
# A simulator is relieved only of what it has clearly too much of, or noise would keep environments moving.
_CLEARLY = 1.25


@dataclass
class Share:
    """Environments that sit in one simulator, and their slots as they travel."""

    session: SimulatorSession
    chosen: IdSet
    slots: bytes
    _parts: dict[int, list[Share]] = field(default_factory=dict)

    def parts(self, most: int, sets: IdSets) -> list[Share]:
        """In groups of at most so many."""
        if len(self.chosen) <= most:
            return [self]
        if most not in self._parts:
            self._parts.clear()
            ids, width = self.chosen.ids, _SLOT.itemsize
            self._parts[most] = [
                Share(self.session, sets.of(ids[k : k + most]), self.slots[width * k : width * (k + most)])
                for k in range(0, len(ids), most)
            ]
        return self._parts[most]


@dataclass(frozen=True)
class Slot:
    """Slots of some environments in their simulators, and their last observations."""

    sessions: list[SimulatorSession]
    which: Array  # [n], of these sessions
    slots: Array  # [n] uint32, of that session
    obs: list[Array]  # [n, ...] leaves
    to_play: Array  # [n] int8
    lost: Array  # [n] bool, whether the simulator disconnected, and the state is gone with it


class SlotTable:
    """Seats of `num_envs` environments. A fleet may seat those of several VecEnvs; sessions know what is free."""

    def __init__(self, num_envs: int):
        self._session_of = np.full(num_envs, _UNSEATED, np.int64)
        self._slot_of = np.zeros(num_envs, _SLOT)
        self._sessions: dict[int, SimulatorSession] = {}
        self._cache: dict[bytes, list[Share]] = {}
        self.homeless = num_envs
        """How many environments have no seat."""

    def seated(self, ids: Array) -> Array:
        """Which of these have a seat."""
        flags: Array = self._session_of[ids] != _UNSEATED
        return flags

    def shares(self, chosen: IdSet, sets: IdSets) -> list[Share]:
        """These environments by simulator; remembered, because the same sets come again and again."""
        known = self._cache.get(chosen.payload)
        if known is None:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            numbers = self._session_of[chosen.ids]
            known = []
            for number in dict.fromkeys(numbers.tolist()):
                ids = chosen.ids[numbers == number]
                known.append(Share(self._sessions[number], sets.of(ids), self._slot_of[ids].tobytes()))
            self._cache[chosen.payload] = known
        return known

    def find(self, ids: Array) -> tuple[list[SimulatorSession], Array, Array]:
        """Where these sit, who all have seats: the simulators, which of them each one's is, and its slot."""
        numbers, which = np.unique(self._session_of[ids], return_inverse=True)
        return [self._sessions[number] for number in numbers.tolist()], which, self._slot_of[ids]

    def fill(self, sessions: list[SimulatorSession]) -> None:
        """Seat who has no seat, where the load is lightest."""
        speed = _speeds(sessions)
        for env_id in np.flatnonzero(self._session_of == _UNSEATED).tolist():
            if not any(session.has_room for session in sessions):
                break
            self._sit(env_id, _lightest(sessions, speed))

    def leave(self, session: SimulatorSession) -> Array:
        """A simulator is gone; returns who sat there."""
        ids = np.flatnonzero(self._session_of == session.number)
        self._session_of[ids] = _UNSEATED
        self._sessions.pop(session.number, None)
        self._note()
        return ids

    def leave_all(self, but: Array | None = None) -> None:
        """Give all seats back, for others who share the simulators; `but` keep theirs yet, who are in requests."""
        stays = np.zeros(len(self._session_of), np.bool_) if but is None else but
        for env_id in np.flatnonzero((self._session_of != _UNSEATED) & ~stays).tolist():
            self._stand_up(env_id)
        self._note()

    def surplus(self, sessions: list[SimulatorSession]) -> list[int]:
        """Who should move so that all simulators take the same time for a step of everybody."""
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
        """What a step of everybody takes in the simulator that takes longest, by its own word."""
        each = (np.count_nonzero(self._session_of == s.number) * s.row_s for s in self._sessions.values())
        return max(each, default=0.0)

    def reseat(self, ids: list[int], sessions: list[SimulatorSession]) -> list[int]:
        """Give these other seats, where the load is lightest, while there are any; returns who has got one."""
        speed, moved = _speeds(sessions), []
        for env_id in ids:
            if not any(session.has_room for session in sessions):
                break  # the simulator that they should go to is not there yet, or is gone again
            self._stand_up(env_id)
            self._sit(env_id, _lightest(sessions, speed))
            moved.append(env_id)
        return moved

    def _sit(self, env_id: int, session: SimulatorSession) -> None:
        self._session_of[env_id], self._slot_of[env_id] = session.number, session.take_slot()
        self._sessions[session.number] = session
        self._note()

    def _stand_up(self, env_id: int) -> None:
        session = self._sessions.get(int(self._session_of[env_id]))
        if session is not None:
            session.free_slot(int(self._slot_of[env_id]))
        self._session_of[env_id] = _UNSEATED

    def _note(self) -> None:
        self._cache.clear()
        self.homeless = int(np.count_nonzero(self._session_of == _UNSEATED))


def _lightest(sessions: list[SimulatorSession], speed: dict[int, float]) -> SimulatorSession:
    """Who of those that have room would take the least time for a step with one more."""
    room = [session for session in sessions if session.has_room]
    return min(room, key=lambda session: (session.seated + 1) / speed[session.number])


def _speeds(sessions: list[SimulatorSession]) -> dict[int, float]:
    """Rows per second of each simulator; who has not been measured counts as the mean of those that have."""
    known = [1.0 / session.row_s for session in sessions if session.row_s > 0]
    if not known:
        return {session.number: float(session.simulator.hello.threads) for session in sessions}
    mean = sum(known) / len(known)
    return {session.number: 1.0 / session.row_s if session.row_s > 0 else mean for session in sessions}


# How long to wait for simulators: at the start, and for environments that lost theirs.


log = logging.getLogger("corral.link")

_POLL_S = 0.25
_SAY_S = 5.0  # what waits for longer is worth a word


class SlotTimeouts:
    """Waits for simulators for so long, says so once, and then gives up with EnvFailed."""

    def __init__(self, fleet: Fleet, most_s: float):
        self._fleet, self._most_s = fleet, most_s
        self._since: float | None = None
        self._said = False

    def gather(self, wanted: int) -> None:
        """Wait for the simulators to begin with."""
        while (there := len(self._fleet.sessions)) < wanted:
            self._wait(f"{there} of {wanted} simulators at {self._where}")
            self._fleet.poll(_POLL_S)
        self._since = None

    def wait_for_slot(self) -> int:
        """Wait for a slot that no environment has; returns how many there are."""
        while not (free := sum(session.room for session in self._fleet.sessions.values() if session.has_room)):
            self._wait(
                f"All slots of the simulators at {self._where} are in use, and evaluation needs one",
                "start them with more --envs, or set eval_episodes=0",
            )
            self._fleet.poll(_POLL_S)
        self._since = None
        return free

    def check(self, homeless: int) -> None:
        """Say that so many environments wait for a simulator, if any do."""
        if homeless:
            self._wait(f"{homeless} environments have no simulator at {self._where}")
        else:
            self._since = None

    @property
    def _where(self) -> str:
        return ", ".join(self._fleet.binding.urls)

    def _wait(self, words: str, remedy: str = "start them, or raise Supervision.start_timeout_s") -> None:
        now = time.monotonic()
        if self._since is None:
            self._since, self._said = now, False
        waited = now - self._since
        if waited > self._most_s:
            raise EnvFailed(f"{words} after {waited:.0f} s; {remedy}.")
        if waited > _SAY_S and not self._said:
            self._said = True
            log.warning("%s; waiting for more, for up to %.0f s.", words, self._most_s - waited)
