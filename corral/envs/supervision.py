"""Failing environments: the fault report, the restart budget, and the watchdog.

An environment that raises, hangs, dies or returns NaN is rebuilt, and its episode ends as truncated and faulty. The
budget separates occasional faults from crash loops: the count of consecutive faults is reset once the rebuilt
environment makes progress; the run ends only after several faults in a row or very many in total.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import Any

from corral.core.errors import EnvFailed

log = logging.getLogger("corral.envs")

IDLE = -1  # in place of an env id: no environment is being stepped
PROGRESS_STEPS = 10


@dataclass(frozen=True)
class Supervision:
    """Deadlines and restart budget of a VecEnv's environments."""

    step_timeout_s: float = 60.0
    start_timeout_s: float = 120.0
    restarts_in_a_row: int = 10
    restarts_total: int = 1000


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
    def _what(self) -> str:
        where = f"(seed {self.seed}, episode {self.episode}, step {self.step})"
        return f"environment {self.env_id} {_VERBS[self.kind]} {where}"


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

    def record(self, fault: Fault) -> None:
        self.recent.append(fault)
        self.restarts += 1
        if fault.kind == "neighbour":  # covered by the report of the environment that failed
            return
        log.warning("%s", fault)
        self._counted += 1
        env = fault.env_id
        stuck = fault.step < PROGRESS_STEPS and fault.episode <= self._restarted_at.get(env, -1)
        self._in_a_row[env] = self._in_a_row.get(env, 0) + 1 if stuck else 1
        self._restarted_at[env] = fault.episode + 1
        if self._in_a_row[env] > self.supervision.restarts_in_a_row:
            raise EnvFailed(
                f"Environment {env} failed {self._in_a_row[env]} times in a row without {PROGRESS_STEPS} good "
                f"steps in between; fix the environment or raise Supervision.restarts_in_a_row. Last: {fault}"
            )
        if self._counted > self.supervision.restarts_total:
            raise EnvFailed(
                f"{self._counted} environment failures exceed Supervision.restarts_total="
                f"{self.supervision.restarts_total}; fix the environment or raise that limit. Last: {fault}"
            )

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


class Watchdog:
    """Reports an environment that hangs in this process, with its stack. Only another process could be killed, so the
    report recommends the process backend.
    """

    def __init__(self, mark: MutableSequence[int], timeout_s: float):
        self._mark, self._timeout_s = mark, timeout_s
        self._thread_id = threading.get_ident()
        self._stop = threading.Event()
        watcher = weakref.WeakMethod(self._check)
        self._thread = threading.Thread(target=_watch, args=(watcher, self._stop, timeout_s), daemon=True)
        self._since, self._seen, self._reported = time.monotonic(), IDLE, False
        self._thread.start()

    def touch(self) -> None:
        self._thread_id = threading.get_ident()
        self._since, self._reported = time.monotonic(), False

    def close(self) -> None:
        self._stop.set()

    def _check(self) -> None:
        current = self._mark[0]
        if current != self._seen:
            self._seen, self._since, self._reported = current, time.monotonic(), False
        elif current != IDLE and not self._reported and time.monotonic() - self._since > self._timeout_s:
            self._reported = True
            frame = sys._current_frames().get(self._thread_id)
            stack = "".join(traceback.format_stack(frame)) if frame else "(its thread is gone)"
            log.error(
                "environment %d hangs: no result for more than %.1f s. Environments in this process cannot be "
                "interrupted; backend='process' kills and restarts them. Its stack:\n%s",
                current, self._timeout_s, stack,
            )  # fmt: skip


def _watch(check: weakref.WeakMethod[Any], stop: threading.Event, timeout_s: float) -> None:
    while not stop.wait(min(1.0, timeout_s / 4)):
        method = check()
        if method is None:
            return
        method()
        del method
