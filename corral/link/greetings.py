"""Connections whose handshake is not complete: few, short-lived, and unable to keep others out for long."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from corral.link.transports.base import Wire

_SILENT_S = 5.0
_PROTECTED_S = 2.0


@dataclass
class Greeting:
    """A connection that has proven nothing yet."""

    since: float = field(default_factory=time.monotonic)
    spoke: bool = False


G = TypeVar("G", bound=Greeting)


class Greetings(Generic[G]):
    """At most so many greetings. One more takes the place of the oldest from where most of them come, those that never
    sent anything first; accepted sessions are not among them.
    """

    def __init__(self, most: int, handshake_s: float):
        self._most, self._handshake_s = most, handshake_s
        self._by_wire: dict[Wire, G] = {}

    def __contains__(self, wire: Wire) -> bool:
        return wire in self._by_wire

    def __iter__(self) -> Iterator[Wire]:
        return iter(list(self._by_wire))

    def __len__(self) -> int:
        return len(self._by_wire)

    def __getitem__(self, wire: Wire) -> G:
        return self._by_wire[wire]

    def add(self, wire: Wire, greeting: G) -> bool:
        """Whether there is room, for which another one may be closed."""
        if len(self._by_wire) >= self._most:
            displaced = self._displaced()
            if displaced is None:
                wire.close()
                return False
            del self._by_wire[displaced]
            displaced.close()
        self._by_wire[wire] = greeting
        return True

    def pop(self, wire: Wire) -> None:
        self._by_wire.pop(wire, None)

    def clear(self) -> None:
        self._by_wire.clear()

    def overdue(self) -> list[tuple[Wire, float]]:
        """Connections that took longer than they may, and how long that is."""
        now = time.monotonic()
        limits = [(wire, now - each.since, self._limit(each)) for wire, each in self._by_wire.items()]
        return [(wire, limit) for wire, age, limit in limits if age > limit]

    def _limit(self, greeting: G) -> float:
        return self._handshake_s if greeting.spoke else min(_SILENT_S, self._handshake_s)

    def _displaced(self) -> Wire | None:
        hosts = Counter(_host(wire) for wire in self._by_wire)
        most = max(hosts.values())
        there = [wire for wire in self._by_wire if hosts[_host(wire)] == most and not wire.initiated]
        silent = [wire for wire in there if not self._by_wire[wire].spoke]
        if silent:
            return silent[0]
        old = [wire for wire in there if time.monotonic() - self._by_wire[wire].since > _PROTECTED_S]
        return old[0] if old else None  # handshakes that are under way take milliseconds


def _host(wire: Wire) -> str:
    return wire.peer.rpartition(":")[0]
