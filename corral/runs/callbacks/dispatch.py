"""Calls the callbacks of a run, and reports errors of user callbacks."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from corral.core.errors import RunFailed
from corral.core.types import Trajectory
from corral.runs.callbacks.base import Callback, Run
from corral.runs.callbacks.slow_calls import SlowCalls
from corral.runs.evaluation.evaluate import Evaluation
from corral.runs.evaluation.evaluator import EvaluationStopped

HOOKS = ("on_start", "on_rollout", "on_update", "on_evaluation", "on_checkpoint", "on_end")
Note = Callable[[str, str], None]
_log = logging.getLogger("corral.runs")


class Dispatcher(Callback):
    """The callbacks of a run as one: the user's, then the built-in ones, whose errors end the run."""

    def __init__(self, users: Sequence[Callback], own: Sequence[Callback], note: Note, slow_calls: SlowCalls):
        self._users = [_UserCallback(callback, note, slow_calls) for callback in users]
        for callback in users:
            for name in dir(callback):
                if name.startswith("on_") and name not in HOOKS:
                    what = f"{type(callback).__qualname__}.{name} is never called: the hooks are {', '.join(HOOKS)}"
                    note("unknown_hook", what)
        self._own = own
        self.active: list[str] = []
        """Hooks that are being called, outermost first."""

    def uses(self, hook: str) -> bool:
        return any(hook in user.hooks for user in self._users)

    def _call(self, hook: str, run: Run, *args: object) -> None:
        self.active.append(hook)
        try:
            for user in self._users:
                user.call(hook, run, *args)
            for callback in self._own:
                getattr(callback, hook)(run, *args)
        finally:
            self.active.pop()

    def on_start(self, run: Run) -> None:
        self._call("on_start", run)

    def on_rollout(self, run: Run, trajectory: Trajectory) -> None:
        self._call("on_rollout", run, trajectory)

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        for user in self._users:
            if metrics or user.callback.every_iteration:
                user.call("on_update", run, metrics)
        for callback in self._own:
            callback.on_update(run, metrics)

    def on_evaluation(self, run: Run, result: Evaluation) -> None:
        self._call("on_evaluation", run, result)

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._call("on_checkpoint", run, path)

    def on_end(self, run: Run) -> None:
        self.active.append("on_end")
        for callback in self._own:
            callback.on_end(run)
        for user in self._users:
            user.call("on_end", run)

    def close(self) -> None:
        for user in self._users:
            user.report_failures()


class _UserCallback:
    def __init__(self, callback: Callback, note: Note, slow_calls: SlowCalls):
        self.callback, self._note, self._slow_calls = callback, note, slow_calls
        self.hooks = {hook for hook in HOOKS if getattr(type(callback), hook) is not getattr(Callback, hook)}
        self._failures: Counter[str] = Counter()

    def call(self, hook: str, *args: object) -> None:
        """Call a hook if it is overridden; an exception is reported once and counted."""
        if hook not in self.hooks:
            return
        name = f"{type(self.callback).__qualname__}.{hook}"
        try:
            # A hook that evaluates ends when the run is told to stop.
            with self._slow_calls.watch("callback", name), contextlib.suppress(EvaluationStopped):
                getattr(self.callback, hook)(*args)
        except Exception as error:
            self._failed(hook, name, error)

    def _failed(self, hook: str, name: str, error: Exception) -> None:
        self._failures[hook] += 1
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"callback {name} raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        if self.callback.ends_run_on_error:
            raise RunFailed(f"{what}, which ends the run.") from error
        if self._failures[hook] == 1:
            rest = "" if hook == "on_end" else "; the run continues, and further errors of this hook are only counted"
            self._note("callback_error", what + rest)
            _log.debug("%s", name, exc_info=error)

    def report_failures(self) -> None:
        for hook, count in self._failures.items():
            if count > 1:
                self._note("callback_error", f"callback {type(self.callback).__qualname__}.{hook} raised {count} times")
