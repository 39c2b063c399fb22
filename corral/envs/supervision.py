"""Failing environments: the fault report, the restart budget, and the watchdog.

An environment that raises, hangs, dies or returns NaN is rebuilt, and its episode ends as truncated and faulty. The
budget separates occasional faults from crash loops: the count of consecutive faults is reset once the rebuilt
environment makes progress; the run ends only after several faults in a row or very many in total.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import Any

from corral.core.errors import EnvFailed, UserError
from corral.core.log import Repeats

log = logging.getLogger("corral.envs")

IDLE = -1  # in place of an env id: no environment is being stepped
_FIRST_STARTING = -2
PROGRESS_STEPS = 10


@dataclass(frozen=True)
class Supervision:
    """Deadlines and restart budget of a VecEnv's environments."""

    step_timeout_s: float = 60.0
    """Seconds that a step may take; after that the environment hangs, and is restarted in a new process."""
    start_timeout_s: float = 120.0
    """Seconds that it may take to build or to reset one environment."""
    restarts_in_a_row: int = 10
    """Failures of an environment without ten good steps or an episode in between; more end the run."""
    restarts_total: int = 1000
    """Failures of all environments of a process; more end the run."""

    def __post_init__(self) -> None:
        for name in ("step_timeout_s", "start_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be a positive number of seconds, got {getattr(self, name)}.")
        for name in ("restarts_in_a_row", "restarts_total"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must be at least 0, got {getattr(self, name)}.")

    def limit_s(self, mark: int) -> float:
        """Seconds that an environment may be marked with this."""
        return self.start_timeout_s if mark < IDLE else self.step_timeout_s


def starting(env_id: int) -> int:
    """The mark of an environment that is built or reset; while it steps, its mark is its id."""
    return _FIRST_STARTING - env_id


def marked_env(mark: int) -> int:
    """The environment of a mark, or IDLE."""
    return mark if mark >= IDLE else _FIRST_STARTING - mark


@dataclass(frozen=True)
class Fault:
    """One failure of one environment, in step `step` (from 1) of `episode`, or in the reset before it (0)."""

    env_id: int
    kind: str  # raised | hung | killed | nan | range | neighbour
    seed: int
    episode: int
    step: int
    detail: str

    def __str__(self) -> str:
        return f"{self._what}\n{self.detail}".rstrip()

    @property
    def line(self) -> str:
        """The fault in one line: of a traceback, the exception."""
        last = self.detail.strip().rpartition("\n")[2]
        return f"{self._what}: {last}" if last else self._what

    @property
    def key(self) -> str:
        """What faults with the same cause share: of a traceback, the exception and its place."""
        lines = self.detail.strip().splitlines() or [""]
        if self.kind == "raised" and (places := _PLACE.findall(self.detail)):
            return f"{lines[-1].partition(':')[0]} {places[-1]}"
        return f"{self.kind} {without_numbers(lines[0].partition(' returned')[0])}"

    @property
    def _what(self) -> str:
        where = f"(seed {self.seed}, episode {self.episode}, step {self.step})"
        return f"environment {self.env_id} {_VERBS[self.kind]} {where}"


_PLACE = re.compile(r'File ".*", line \d+')
_NUMBER = re.compile(r"\d+(\.\d*)?")


def without_numbers(text: str) -> str:
    """The text with a placeholder for each number: reports of the same cause are equal then."""
    return _NUMBER.sub("#", text)


_VERBS = {
    "raised": "raised an exception",
    "hung": "hung past its deadline",
    "killed": "was lost when its process died",
    "nan": "returned a value that is not finite",
    "range": "returned an observation outside its space",
    "neighbour": "was restarted because another environment in its process failed",
}


class FaultLog:
    """Counts faults, keeps the most recent ones, and ends the run when the budget is exhausted."""

    def __init__(self, supervision: Supervision):
        self.supervision = supervision
        self.recent: deque[Fault] = deque(maxlen=200)
        self.restarts = 0
        self._counted = 0  # failures, without those caused by another environment in the same process
        self._in_a_row: dict[int, int] = {}
        self._restarted_at: dict[int, int] = {}
        self._repeats = Repeats[Fault]()

    def record(self, fault: Fault) -> None:
        self.recent.append(fault)
        self.restarts += 1
        if fault.kind == "neighbour":  # covered by the report of the environment that failed
            return
        if count := self._repeats.count(fault.key, fault):
            log.warning("%s", fault if count == 1 else _repeated(count, fault))
        self._counted += 1
        env = fault.env_id
        stuck = fault.step < PROGRESS_STEPS and fault.episode <= self._restarted_at.get(env, -1)
        self._in_a_row[env] = self._in_a_row.get(env, 0) + 1 if stuck else 1
        self._restarted_at[env] = fault.episode + 1
        if self._in_a_row[env] > self.supervision.restarts_in_a_row:
            raise EnvFailed(
                f"Environment {env} failed {self._in_a_row[env]} times in a row without {PROGRESS_STEPS} good "
                f"steps in between, the last time: {fault.line}; fix the environment or raise restarts_in_a_row."
            )
        if self._counted > self.supervision.restarts_total:
            raise EnvFailed(
                f"{self._counted} failures of environments exceed restarts_total={self.supervision.restarts_total}, "
                f"the last one: {fault.line}; fix the environment or raise restarts_total."
            )

    def close(self) -> None:
        """Log the totals of faults that repeated."""
        for count, fault in self._repeats.rest():
            log.warning("%s", _repeated(count, fault))

    def state_dict(self) -> dict[str, Any]:
        """The counters only; the faults are in the log."""
        return {
            "restarts": self.restarts,
            "charged": self._counted,
            "in_a_row": {str(env): count for env, count in self._in_a_row.items()},
            "restarted_at": {str(env): episode for env, episode in self._restarted_at.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restarts, self._counted = state["restarts"], state["charged"]
        self._in_a_row = {int(env): count for env, count in state["in_a_row"].items()}
        self._restarted_at = {int(env): episode for env, episode in state["restarted_at"].items()}


def _repeated(count: int, fault: Fault) -> str:
    return f"{count:,} faults like this one, which is shown above in full the first time: {fault.line}"


class Watchdog:
    """Reports an environment that hangs in this process, with its stack. Only another process could be killed, so the
    report recommends the process backend.
    """

    def __init__(self, mark: MutableSequence[int], supervision: Supervision):
        self._mark, self._supervision = mark, supervision
        self._thread_id = threading.get_ident()
        self._stop = threading.Event()
        watcher = weakref.WeakMethod(self._check)
        poll_s = min(1.0, supervision.step_timeout_s / 4, supervision.start_timeout_s / 4)
        self._thread = threading.Thread(target=_watch, args=(watcher, self._stop, poll_s), daemon=True)
        self._since, self._seen, self._reported = time.monotonic(), IDLE, False
        self._thread.start()

    def touch(self) -> None:
        self._thread_id = threading.get_ident()
        self._since, self._reported = time.monotonic(), False

    def close(self) -> None:
        self._stop.set()

    def _check(self) -> None:
        current = self._mark[0]
        limit_s = self._supervision.limit_s(current)
        if current != self._seen:
            self._seen, self._since, self._reported = current, time.monotonic(), False
        elif current != IDLE and not self._reported and time.monotonic() - self._since > limit_s:
            self._reported = True
            frame = sys._current_frames().get(self._thread_id)
            stack = "".join(traceback.format_stack(frame)) if frame else "(its thread is gone)"
            log.error(
                "environment %d hangs: no result for more than %.1f s. Environments in this process cannot be "
                "interrupted; backend='process' kills and restarts them. Its stack:\n%s",
                marked_env(current), limit_s, stack,
            )  # fmt: skip


def _watch(check: weakref.WeakMethod[Any], stop: threading.Event, poll_s: float) -> None:
    while not stop.wait(poll_s):
        method = check()
        if method is None:
            return
        method()
        del method
