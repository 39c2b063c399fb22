"""Environments of simulators in a checkpoint: their states as bytes, where the simulators export them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
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
Places = tuple[list[SimulatorSession], Array, Array]
"""Of environments: the simulators, the index of each environment's among them, and its slot."""


def export_states(fleet: Fleet, env_ids: Array, where: EnvSlots) -> dict[str, Array]:
    """Exported states of these idle environments by id, without those whose simulator cannot export."""
    found: dict[str, Array] = {}

    def export(states: StateClient, ids: Array, slots: Array) -> None:
        kept, saved = states.save(slots)
        good = saved.status == 0
        if good.any():
            blobs, exported = states.export(kept[good])
            for env_id, blob, status in zip(ids[good].tolist(), blobs, exported.status.tolist(), strict=True):
                if status == 0:
                    found[str(env_id)] = np.frombuffer(blob, np.uint8).copy()

    here = ~where.lost
    places = where.sessions, where.which[here], where.slots[here]
    _for_some(fleet, env_ids[here], places, export, "the states of environments %s are not saved: %s")
    return found


def import_states(fleet: Fleet, env_ids: Array, places: Places, saved: Mapping[str, Any]) -> list[int]:
    """Load saved states into environments, all of which have slots; returns those where that worked."""
    known = np.array([str(env_id) in saved for env_id in env_ids.tolist()], np.bool_)
    restored: list[int] = []

    def load(states: StateClient, ids: Array, slots: Array) -> None:
        kept, taken = states.import_states([saved[str(env_id)].tobytes() for env_id in ids.tolist()])
        good = taken.status == 0
        if good.any():
            loaded = states.load(slots[good], kept[good])
            restored.extend(ids[good][loaded.status == 0].tolist())

    sessions, which, slots = places
    places = sessions, which[known], slots[known]
    _for_some(fleet, env_ids[known], places, load, "environments %s are not restored: %s")
    return restored


def _for_some(
    fleet: Fleet, env_ids: Array, places: Places, do: Callable[[StateClient, Array, Array], None], failed: str
) -> None:
    """Call `do` for some environments at a time, with their slots, in each simulator that exports."""
    sessions, which, slots = places
    for k, session in enumerate(sessions):
        mine = np.flatnonzero(which == k) if session.simulator.hello.level >= _EXPORTS else ()
        for start in range(0, len(mine), _AT_ONCE):
            rows, states = mine[start : start + _AT_ONCE], StateClient(fleet, session)
            try:
                do(states, env_ids[rows], slots[rows])
            except EnvFailed as error:
                log.warning(failed, env_ids[rows].tolist(), error)
            finally:
                states.next_generation()
