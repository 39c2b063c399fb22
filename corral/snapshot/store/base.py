"""`StateStore`: exported states by name, and the store in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from corral.core.errors import UserError
from corral.snapshot.states import StatesFull

MAX_NAME = 512  # bytes


class StateStore(ABC):
    """Exported states by name, within a budget; a state is returned unchanged until it is dropped."""

    @abstractmethod
    def put(self, name: str, state: bytes) -> None:
        """Store a state, replacing one with the same name; StatesFull if it does not fit."""

    @abstractmethod
    def get(self, name: str) -> bytes | None: ...

    @abstractmethod
    def drop(self, name: str) -> bool:
        """Drop a state; returns whether there was one."""

    @abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """Names that begin with `prefix`, sorted."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Safe to call twice."""

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_name(name: str) -> str:
    """The name, if it is valid; UserError otherwise."""
    fits = isinstance(name, str) and 0 < len(name.encode("utf-8", "replace")) <= MAX_NAME and name.isprintable()
    if not fits:
        raise UserError(f"The name of a state is 1 to {MAX_NAME} bytes of printable text, got {str(name)[:80]!r}.")
    return name


@dataclass(frozen=True)
class StateBudget:
    """Limits of a store."""

    bytes: int = 1 << 30
    count: int = 100_000

    def require_room(self, held: int, count: int, old: int | None, size: int) -> None:
        """StatesFull if a state of `size` does not fit, in place of one of `old` bytes if not None."""
        if held - (old or 0) + size > self.bytes:
            raise StatesFull(f"{held} bytes are stored, {size} more would exceed the limit of {self.bytes}; drop some")
        if old is None and count >= self.count:
            raise StatesFull(f"{count} states are stored, the limit is {self.count}; drop some")


class MemoryStates(StateStore):
    """A dict with a budget."""

    def __init__(self, budget: StateBudget | None = None):
        self._budget, self._states, self._held = budget or StateBudget(), dict[str, bytes](), 0

    def put(self, name: str, state: bytes) -> None:
        old = self._states.get(check_name(name))
        self._budget.require_room(self._held, len(self._states), None if old is None else len(old), len(state))
        self._states[name] = bytes(state)
        self._held += len(state) - (0 if old is None else len(old))

    def get(self, name: str) -> bytes | None:
        return self._states.get(check_name(name))

    def drop(self, name: str) -> bool:
        state = self._states.pop(check_name(name), None)
        self._held -= 0 if state is None else len(state)
        return state is not None

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._states if name.startswith(prefix))

    @property
    def nbytes(self) -> int:
        return self._held
