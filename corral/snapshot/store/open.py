"""`open_states`: the store that a name or URL stands for."""

from __future__ import annotations

from corral.snapshot.store.base import MemoryStates, StateBudget, StateStore
from corral.snapshot.store.client import RemoteStates
from corral.snapshot.store.files import FileStates


def open_states(where: str = "memory", budget: StateBudget | None = None, token_file: str | None = None) -> StateStore:
    """Open `memory`, the URL of a state server, or a folder. A server has its own budget."""
    if where == "memory":
        return MemoryStates(budget)
    return RemoteStates(where, token_file) if "://" in where else FileStates(where, budget)
