"""Callbacks that every run has: evaluation, rows of metrics, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping

from corral.config.experiment import Experiment
from corral.runs.callbacks.base import Callback, Run
from corral.runs.evaluate import Evaluation


class Clock:
    """Due after a number of environment steps or seconds; 0 turns either off."""

    def __init__(self, every_steps: int, every_s: float) -> None:
        self._every_steps, self.every_s = every_steps, every_s
        self.done(0)

    def due(self, steps: int) -> bool:
        by_steps = self._every_steps > 0 and steps // self._every_steps > self._last_steps // self._every_steps
        return by_steps or (self.every_s > 0 and time.monotonic() - self._last_s >= self.every_s)

    def done(self, steps: int) -> None:
        self._last_steps, self._last_s = steps, time.monotonic()


class EvaluationClock(Callback):
    """Evaluates every `eval_every` steps and at the end of the run."""

    def __init__(self, config: Experiment) -> None:
        self._enabled = config.eval_episodes > 0
        self._clock = Clock(config.eval_interval if self._enabled else 0, 0.0)

    def on_start(self, run: Run) -> None:
        self._clock.done(run.steps)

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        if self._clock.due(run.steps) or (self._enabled and run.steps >= run.config.steps):
            self._clock.done(run.steps)
            run.evaluate()


class MetricsClock(Callback):
    """Writes rows of metrics, by default one per second."""

    def __init__(self, config: Experiment) -> None:
        self._clock = Clock(config.log_every, config.log_every_s)

    def on_start(self, run: Run) -> None:
        self._clock.done(run.steps)

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        if self._clock.due(run.steps):
            self._clock.done(run.steps)
            run.write_metrics()


class Checkpoints(Callback):
    """Saves the run at intervals, and the best model after the best evaluation so far.

    A large replay buffer takes long to write: checkpoints take at most a twentieth of the time.
    """

    def __init__(self, config: Experiment, *, save_first: bool) -> None:
        self._every_s = config.checkpoint_every_s
        self._clock = Clock(config.checkpoint_every, self._every_s)
        self._save_first, self._best = save_first, False

    def on_start(self, run: Run) -> None:
        self._clock.done(run.steps)
        if self._save_first:
            self._save(run)

    def on_evaluation(self, run: Run, result: Evaluation) -> None:
        """The best model is saved once the row of its evaluation is written."""
        self._best |= run.is_best

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        if (self._best or self._clock.due(run.steps)) and run.steps < run.config.steps:
            self._save(run)

    def _save(self, run: Run) -> None:
        start = time.monotonic()
        run.save(best=self._best)
        self._best = False
        self._clock.done(run.steps)
        if self._every_s:
            self._clock.every_s = max(self._every_s, 20 * (time.monotonic() - start))
