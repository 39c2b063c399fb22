"""Callbacks that every run has: evaluation, rows of metrics, checkpoints."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from corral.config.experiment import Experiment
from corral.runs.callbacks.base import Callback, Run
from corral.runs.evaluation.evaluate import Evaluation


class Clock(Callback):
    """Due after a number of environment steps or seconds; 0 turns either off."""

    def __init__(self, every_steps: int, every_s: float) -> None:
        self._every_steps, self._every_s = every_steps, every_s
        self.done(0)

    def on_start(self, run: Run) -> None:
        self.done(run.steps)

    def due(self, steps: int) -> bool:
        by_steps = self._every_steps > 0 and steps // self._every_steps > self._last_steps // self._every_steps
        return by_steps or (self._every_s > 0 and time.monotonic() - self._last_s >= self._every_s)

    def done(self, steps: int) -> None:
        self._last_steps, self._last_s = steps, time.monotonic()


class EvaluationClock(Clock):
    """Calls `evaluate` every `eval_every` steps and at the end of the run, then with `last=True`."""

    def __init__(self, config: Experiment, evaluate: Callable[[bool], None]) -> None:
        self._enabled, self._evaluate = config.eval_episodes > 0, evaluate
        super().__init__(config.eval_interval if self._enabled else 0, 0.0)

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        last = self._enabled and run.steps >= run.config.steps
        if last or self.due(run.steps):
            self.done(run.steps)
            self._evaluate(last)


class MetricsClock(Clock):
    """Writes rows of metrics, by default one per second."""

    def __init__(self, config: Experiment) -> None:
        super().__init__(config.log_every, config.log_every_s)

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        if self.due(run.steps):
            self.done(run.steps)
            run.write_metrics()


class Checkpoints(Clock):
    """Saves the run at intervals (at most 5 % of the time) and the best model after its evaluation."""

    def __init__(self, config: Experiment, *, save_first: bool) -> None:
        super().__init__(config.checkpoint_every, config.checkpoint_every_s)
        self._configured_s = config.checkpoint_every_s
        self._took: deque[float] = deque(maxlen=2)  # seconds of the last ones
        self._save_first, self._best = save_first, False

    def on_start(self, run: Run) -> None:
        super().on_start(run)
        if self._save_first:
            self._save(run)
            self._took.clear()  # it waits for what is still starting
            self._every_s = self._configured_s

    def on_evaluation(self, run: Run, result: Evaluation) -> None:
        """The best model is saved once the row of its evaluation is written; in the background the run does it."""
        self._best |= run.is_best and not run.config.eval_background

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        if (self._best or self.due(run.steps)) and run.steps < run.config.steps:
            self._save(run)

    def _save(self, run: Run) -> None:
        start = time.monotonic()
        run.save(best=self._best)
        self._best = False
        self.done(run.steps)
        self._took.append(time.monotonic() - start)
        if self._configured_s:  # the faster one counts: a single save may have waited for something
            self._every_s = max(self._configured_s, 20 * min(self._took))
