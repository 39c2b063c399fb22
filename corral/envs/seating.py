"""Which environment sits in which slot of which simulator, and who should move to balance the load."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from corral.envs.id_set import IdSet
from corral.link.session import Session
from corral.types import Array

_UNSEATED = -1
# A simulator is relieved only of what it has clearly too much of, or noise would keep environments moving.
_CLEARLY = 1.25


class Seating:
    """Seats of `num_envs` environments. A fleet may seat those of several VecEnvs: sessions know which slots are free."""

    def __init__(self, num_envs: int):
        self._session_of = np.full(num_envs, _UNSEATED, np.int64)
        self._slot_of = np.zeros(num_envs, "<u4")
        self._sessions: dict[int, Session] = {}
        self._cache: dict[bytes, list[tuple[Session, Array]]] = {}
        self.homeless = num_envs
        """How many environments have no seat."""

    def seated(self, ids: Array) -> Array:
        """Which of these have a seat."""
        flags: Array = self._session_of[ids] != _UNSEATED
        return flags

    def slots(self, ids: Array) -> Array:
        """Slots of these environments, as they travel."""
        slots: Array = self._slot_of[ids]
        return slots

    def groups(self, chosen: IdSet) -> list[tuple[Session, Array]]:
        """These environments by simulator; remembered, because the same sets come again and again."""
        known = self._cache.get(chosen.payload)
        if known is None:
            if len(self._cache) >= 1024:
                self._cache.clear()
            known = self._cache[chosen.payload] = list(self.groups_of(chosen.ids))
        return known

    def groups_of(self, ids: Array) -> Iterator[tuple[Session, Array]]:
        """These environments by simulator."""
        numbers = self._session_of[ids]
        for number in dict.fromkeys(numbers.tolist()):
            yield self._sessions[number], ids[numbers == number]

    def fill(self, sessions: list[Session]) -> None:
        """Seat who has no seat, where the load is lightest."""
        for env_id in np.flatnonzero(self._session_of == _UNSEATED).tolist():
            room = [session for session in sessions if session.has_room]
            if not room:
                break
            self._sit(env_id, min(room, key=_load))

    def leave(self, session: Session) -> Array:
        """A simulator is gone; returns who sat there."""
        ids = np.flatnonzero(self._session_of == session.number)
        self._session_of[ids] = _UNSEATED
        self._sessions.pop(session.number, None)
        self._note()
        return ids

    def leave_all(self) -> None:
        """Give all seats back."""
        for env_id in np.flatnonzero(self._session_of != _UNSEATED).tolist():
            self._stand_up(env_id)
        self._note()

    def surplus(self, sessions: list[Session]) -> list[int]:
        """Who should move so that all simulators take the same time for a step of everybody."""
        counts = {session.number: int(np.count_nonzero(self._session_of == session.number)) for session in sessions}
        total = sum(counts.values())
        speed = {session.number: _speed(session) for session in sessions}
        whole = sum(speed.values())
        movers: list[int] = []
        for session in sessions:
            fair = total * speed[session.number] / whole
            extra = counts[session.number] - int(np.ceil(fair))
            if extra > 0 and counts[session.number] > _CLEARLY * fair:
                movers += np.flatnonzero(self._session_of == session.number)[-extra:].tolist()
        return movers

    def reseat(self, ids: Array, sessions: list[Session]) -> None:
        """Give these other seats, where the load is lightest."""
        for env_id in ids.tolist():
            self._stand_up(env_id)
        self.fill(sessions)

    def _sit(self, env_id: int, session: Session) -> None:
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


def _speed(session: Session) -> float:
    """Rows per second, where that is known; otherwise all threads are alike."""
    return session.simulator.hello.threads / (session.row_s or 1e-5)


def _load(session: Session) -> float:
    return (session.seated + 1) / _speed(session)
