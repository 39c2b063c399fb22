"""Environments of simulators in a checkpoint: their states as bytes, where the simulators export them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from corral.core.errors import EnvFailed
from corral.core.types import Array
from corral.envs.backends.simulators.slots import EnvSlots
from corral.link.client.fleet import Fleet
from corral.link.client.session import SimulatorSession
from corral.link.client.states import StateClient

log = logging.getLogger("corral.link")

_EXPORTS = 4  # the level of simulators that export states
_AT_ONCE = 16  # states per message, whose size is not known in advance


def export_states(fleet: Fleet, env_ids: Array, where: EnvSlots) -> dict[str, Array]:
    """Exported states of these idle environments by id, without those whose simulator cannot export."""
    found: dict[str, Array] = {}
    here = ~where.lost
    for session, ids, slots in _parts(env_ids[here], where.sessions, where.which[here], where.slots[here]):
        states = StateClient(fleet, session)
        try:
            kept, saved = states.save(slots)
            good = saved.status == 0
            blobs, exported = states.export(kept[good]) if good.any() else ([], saved)
        except EnvFailed as error:
            log.warning("the states of environments %s are not saved: %s", ids.tolist(), error)
            continue
        finally:
            states.next_generation()
        for env_id, blob, status in zip(ids[good].tolist(), blobs, exported.status.tolist(), strict=False):
            if status == 0:
                found[str(env_id)] = np.frombuffer(blob, np.uint8).copy()
    return found


def import_states(
    fleet: Fleet, env_ids: Array, where: tuple[list[SimulatorSession], Array, Array], saved: Mapping[str, Any]
) -> list[int]:
    """Load saved states into environments, all of which have slots; returns those where that worked."""
    known = np.array([str(env_id) in saved for env_id in env_ids.tolist()], np.bool_)
    sessions, which, all_slots = where
    restored: list[int] = []
    for session, ids, slots in _parts(env_ids[known], sessions, which[known], all_slots[known]):
        states = StateClient(fleet, session)
        try:
            kept, taken = states.import_states([saved[str(env_id)].tobytes() for env_id in ids.tolist()])
            good = taken.status == 0
            loaded = states.load(slots[good], kept[good]) if good.any() else taken
        except EnvFailed as error:
            log.warning("environments %s are not restored: %s", ids.tolist(), error)
            continue
        finally:
            states.next_generation()
        if good.any():
            restored += ids[good][loaded.status == 0].tolist()
    return restored


def _parts(
    env_ids: Array, sessions: list[SimulatorSession], which: Array, slots: Array
) -> Iterator[tuple[SimulatorSession, Array, Array]]:
    """These environments by simulator, a few at a time, for simulators that export."""
    for k, session in enumerate(sessions):
        if session.simulator.hello.level >= _EXPORTS:
            mine = np.flatnonzero(which == k)
            for start in range(0, len(mine), _AT_ONCE):
                rows = mine[start : start + _AT_ONCE]
                yield session, env_ids[rows], slots[rows]
