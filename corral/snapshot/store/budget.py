"""How much a keeper of states may hold."""

from __future__ import annotations

from dataclasses import dataclass

from corral.snapshot.store.base import StatesFull


@dataclass(frozen=True)
class StateBudget:
    """Most bytes and most states."""

    bytes: int = 1 << 30
    count: int = 100_000

    def require_room(self, held: int, count: int, old: int | None, size: int) -> None:
        """StatesFull when a state of `size`, in the place of one of `old` bytes if that is not None, does not fit."""
        if held - (old or 0) + size > self.bytes:
            raise StatesFull(f"{held} bytes are held, {size} more would be above the budget of {self.bytes}; drop some")
        if old is None and count >= self.count:
            raise StatesFull(f"{count} states are held, the budget is {self.count}; drop some")
