"""States in this process's memory."""

from __future__ import annotations

from corral.snapshot.store.base import StateKeeper, check_name
from corral.snapshot.store.budget import StateBudget


class MemoryStates(StateKeeper):
    """A dict with a budget."""

    def __init__(self, budget: StateBudget | None = None):
        self._budget, self._states, self._held = budget or StateBudget(), dict[str, bytes](), 0

    def put(self, name: str, state: bytes) -> None:
        """Keep a copy."""
        old = self._states.get(check_name(name))
        self._budget.require_room(self._held, len(self._states), None if old is None else len(old), len(state))
        self._states[name] = bytes(state)
        self._held += len(state) - (0 if old is None else len(old))

    def get(self, name: str) -> bytes | None:
        """The state, or None."""
        return self._states.get(check_name(name))

    def drop(self, name: str) -> bool:
        """Forget it."""
        state = self._states.pop(check_name(name), None)
        self._held -= 0 if state is None else len(state)
        return state is not None

    def names(self, prefix: str = "") -> list[str]:
        """Sorted."""
        return sorted(name for name in self._states if name.startswith(prefix))

    @property
    def nbytes(self) -> int:
        """Sum of the states."""
        return self._held
