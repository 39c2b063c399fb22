"""Sessions that survive the death of the process that learns: it is started again from the last checkpoint."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from corral.config.experiment import Experiment
from corral.core.errors import RunFailed
from corral.runs.events import EventLog
from corral.runs.folder import RunFolder
from corral.runs.session import Result, Session
from corral.runtimes.base import MakeRole, RoleLost
from corral.runtimes.process import ProcessRuntime
from corral.runtimes.supervised_role import Member

_LOOK_S = 1.0


class LearnerRole:
    """A session in a process of its own."""

    def __init__(self, experiment: Experiment, path: Path, resume: bool, quiet: bool, log_level: int):
        logging.getLogger("corral").setLevel(log_level)
        self._session = Session(experiment, RunFolder.open(path), resume=resume, quiet=quiet)

    def run(self) -> dict[str, Any]:
        """Train; the result as plain values."""
        result = asdict(self._session.run())
        return result | {"run_dir": str(result["run_dir"])}


def run_guarded(experiment: Experiment, folder: RunFolder, *, resume: bool, quiet: bool) -> Result:
    """Carry out a session in a process of its own; if that is lost, another goes on from the last checkpoint."""
    runtime = ProcessRuntime()

    def note(kind: str, text: str) -> None:
        log = EventLog(folder)  # the process that is lost does not write any more
        log.add(kind, text)
        log.close()

    level = logging.getLogger("corral").getEffectiveLevel()
    make = partial(_make_learner, experiment, folder.path, resume, quiet, level)
    learner = Member(runtime, "learner", make, note, experiment.scale.max_restarts)
    try:
        with _signals_passed_on(learner) as told:
            learner.call("run")
            while True:
                if told and not learner.calls:  # it was told to stop before it could save anything
                    raise KeyboardInterrupt
                if not learner.calls and learner.revive():
                    learner.call("run")
                if learner.given_up:
                    raise RunFailed("The learner was lost too often; events.jsonl of the run says how.")
                if runtime.wait(list(learner.calls), _LOOK_S):
                    try:
                        result = learner.calls.popleft().result()
                        return Result(**result | {"run_dir": folder.path})
                    except RoleLost as lost:
                        learner.lose(str(lost))
    finally:
        runtime.close()


def _make_learner(
    experiment: Experiment, path: Path, resume: bool, quiet: bool, log_level: int, start: int
) -> MakeRole:
    resume = resume or (start > 0 and any(path.glob("checkpoints/*")))
    return lambda mailbox: LearnerRole(experiment, path, resume, quiet, log_level)


@contextlib.contextmanager
def _signals_passed_on(learner: Member) -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C are the learner's to handle; a second one ends everything at once. Gives those that came."""
    told: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield told
        return

    def stop(number: int, frame: FrameType | None) -> None:
        pid = learner.facts()["pid"]
        if told or pid is None:
            raise KeyboardInterrupt
        told.append(number)
        os.kill(pid, signal.SIGTERM)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
