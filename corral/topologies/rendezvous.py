"""How workers of each exchange find each other, and what their state is as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from corral.core.encoding import Value
from corral.learn.exchange.all_reduce import open_store
from corral.learn.state import mean_state
from corral.runtimes.base import Runtime
from corral.runtimes.supervised_role import Member

# For everybody to come to an update: as long as a slow simulator may take, many times a step's deadline. Who is killed
# is noticed at once by its connection, who is frozen by the runtime.
TOGETHER_S = 600.0
MEET_S = 120.0  # to join a group
ANSWER_S = 60.0

Ask = Callable[[Sequence[Member], str, Sequence[Sequence[Value]], float], dict[Member, Value]]
"""Calls a method of several members with arguments of their own, and waits; who does not answer is lost."""


class Hub(Protocol):
    """What is different about an exchange, seen from the run."""

    members: list[Member]
    """Parts besides the workers."""
    re_form: bool
    """Whether the others must meet again when one of them is lost."""

    def gather(self, crew: list[Member], addresses: dict[Member, Value], state: Value) -> bool:
        """Bring these together, with this state where they need one; False when somebody did not come."""

    def state(self, crew: list[Member]) -> Value | None:
        """What all of them have learned; None when nobody is left to ask."""

    def revive(self) -> bool:
        """Start lost parts again; True when one was, and all have to meet."""

    def metrics(self) -> dict[str, float]:
        """What they tell."""


class AllReduceHub:
    """Everybody has the same state, and meets at a store that is here."""

    re_form = True

    def __init__(self, runtime: Runtime, ask: Ask):
        self.members: list[Member] = []
        self._runtime, self._ask = runtime, ask
        self._store = open_store(runtime.host)
        self._meetings = 0

    def gather(self, crew: list[Member], addresses: dict[Member, Value], state: Value) -> bool:
        """All take over the same state, and join a new group."""
        loaded = self._ask(crew, "load", [[state]] * len(crew), ANSWER_S)
        if len(loaded) < len(crew):
            return False
        self._meetings += 1
        where = self._runtime.host, self._store.port, self._meetings
        joined = self._ask(crew, "meet", [[*where, rank, len(crew), TOGETHER_S] for rank in range(len(crew))], MEET_S)
        return len(joined) == len(crew) and all(answer is None for answer in joined.values())

    def state(self, crew: list[Member]) -> Value | None:
        """That of the first who answers."""
        for member in list(crew):  # who does not answer is taken out
            if answer := self._ask([member], "state", [[]], ANSWER_S):
                return answer[member]
        return None

    def revive(self) -> bool:
        """There is nobody else."""
        return False

    def metrics(self) -> dict[str, float]:
        """Nothing."""
        return {}


class GossipHub:
    """Everybody has its own state; as a whole they have its mean."""

    re_form = False

    def __init__(self, ask: Ask):
        self.members: list[Member] = []
        self._ask, self._meetings, self._met = ask, 0, set[tuple[Member, int]]()
        self._distance = 0.0

    def gather(self, crew: list[Member], addresses: dict[Member, Value], state: Value) -> bool:
        """Newcomers take over the mean; then all know all."""
        new = [member for member in crew if (member, member.restarts) not in self._met]
        loaded = self._ask(new, "load", [[state]] * len(new), ANSWER_S)
        self._met |= {(member, member.restarts) for member in loaded}
        if len(loaded) < len(new):
            return False
        self._meetings += 1
        peers = [addresses[member] for member in crew]
        joined = self._ask(crew, "meet", [[peers, rank, self._meetings] for rank in range(len(crew))], ANSWER_S)
        return len(joined) == len(crew)

    def state(self, crew: list[Member]) -> Value | None:
        """The mean."""
        states = list(self._ask(crew, "state", [[]] * len(crew), ANSWER_S).values())
        if not states:
            return None
        mean = mean_state(states)
        self._distance = max(_distance(state["model"], mean["model"]) for state in states)
        return mean

    def revive(self) -> bool:
        """There is nobody else."""
        return False

    def metrics(self) -> dict[str, float]:
        """How far the one who is furthest is from the mean, at the last look."""
        return {"exchange/consensus_distance": self._distance}


def _distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Between the weights of two networks, relative to the size of the second's."""
    names = [name for name, value in other.items() if value.dtype == np.float32]  # statistics are float64
    apart = sum(float(np.square(one[name] - other[name], dtype=np.float64).sum()) for name in names)
    size = sum(float(np.square(other[name], dtype=np.float64).sum()) for name in names)
    return float(np.sqrt(apart / max(size, 1e-24)))
