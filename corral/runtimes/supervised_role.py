"""A role that is restarted when it is lost, within a budget."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from corral.core.encoding import Value
from corral.core.machine import Backoff
from corral.runtimes.base import Call, Handle, MakeRole, RoleLost, Runtime

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_POLL_S = 0.5


class SupervisedRole:
    """One role of a run: restarted at once, then after growing pauses, and given up after `max_restarts`."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        make: Callable[[int], MakeRole],
        note: Callable[[str, str], None],
        max_restarts: int,
    ):
        self._runtime, self.name, self._make, self._note = runtime, name, make, note
        self._max_restarts = max_restarts
        self.restarts = 0
        self.calls: deque[Call] = deque()  # pending answers, oldest first
        self._due, self._backoff = 0.0, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._handle: Handle | None = runtime.spawn(name, make(0))

    @property
    def alive(self) -> bool:
        return self._handle is not None

    @property
    def given_up(self) -> bool:
        return self._handle is None and self.restarts >= self._max_restarts

    def call(self, method: str, *args: Value) -> None:
        assert self._handle is not None
        self.calls.append(self._handle.call(method, *args))

    def send_mail(self, key: str, value: Value) -> None:
        assert self._handle is not None
        self._handle.send_mail(key, value)

    def terminate(self) -> None:
        assert self._handle is not None
        self._handle.terminate()

    def mark_lost(self, why: str) -> None:
        if self._handle is not None:
            self._handle.stop(0.0)
            self._handle = None
            self.calls.clear()
            pause = self._backoff.next() if self.restarts else 0.0
            self._due = time.monotonic() + pause
            plan = "not restarting" if self.given_up else f"restarting in {pause:.0f} s"
            self._note("lost", f"{why.splitlines()[0]}; {plan} ({self.restarts} of {self._max_restarts} restarts used)")

    def restart_if_due(self) -> bool:
        """Restart it if that is due; True when it was just started."""
        if self._handle is not None or self.given_up or time.monotonic() < self._due:
            return False
        self.restarts += 1
        self._handle = self._runtime.spawn(self.name, self._make(self.restarts))
        return True

    def status(self) -> dict[str, Any]:
        pid = None if self._handle is None else self._handle.pid
        return {"name": self.name, "pid": pid, "alive": self.alive, "restarts": self.restarts}


def collect(
    runtime: Runtime,
    members: Sequence[SupervisedRole],
    timeout_s: float,
    mark_lost: Callable[[SupervisedRole, str], None],
) -> dict[SupervisedRole, Value]:
    """The oldest pending answer of each member that answers in time; `mark_lost` is called for the others."""
    answers: dict[SupervisedRole, Value] = {}
    waiting, until = list(members), time.monotonic() + timeout_s
    while waiting and time.monotonic() < until:
        runtime.wait([member.calls[0] for member in waiting], _POLL_S)
        for member in [member for member in waiting if member.calls[0].done]:
            waiting.remove(member)
            try:
                answers[member] = member.calls.popleft().result()
            except RoleLost as lost:
                mark_lost(member, str(lost))
    for member in waiting:
        mark_lost(member, f"{member.name} did not answer for {timeout_s:.0f} s")
    return {member: answers[member] for member in members if member in answers}
