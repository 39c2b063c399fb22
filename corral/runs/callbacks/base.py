"""`corral.Callback`: hooks of a run, and the view of the run that they get."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from corral.config.experiment import Experiment
from corral.core.types import Trajectory
from corral.runs.evaluation.evaluate import Evaluation


class Run(Protocol):
    """A run in progress, as callbacks see it."""

    @property
    def steps(self) -> int:
        """Environment steps so far."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The latest value of every metric."""

    @property
    def config(self) -> Experiment:
        """The settings of the run; read-only."""

    @property
    def run_dir(self) -> Path: ...

    @property
    def learning_rate(self) -> float:
        """The current learning rate, of the first parameter group; assigning one is `set_learning_rate(value)`."""

    @learning_rate.setter
    def learning_rate(self, value: float) -> None: ...

    def set_learning_rate(self, value: float | None, group: str | None = None) -> None:
        """Replace the schedule of a parameter group from the next batch on, also after a resume; None restores it.

        An algorithm with several groups needs the name of one.
        """

    def log(self, name: str, value: float) -> None:
        """Add a value of a metric; the next row has the mean of the values since the last row."""

    def stop(self, reason: str) -> None:
        """End the run after the current iteration, with a checkpoint; `corral resume` can continue it."""

    def evaluate(self) -> Evaluation:
        """Evaluate now with deterministic and sampled actions; then calls `on_evaluation`."""

    @property
    def evaluated_at(self) -> int:
        """Environment steps of the policy that was evaluated last; with `eval_background` that was some time ago."""

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation was the best so far."""

    @property
    def best_return(self) -> float:
        """The highest mean return of an evaluation, also before a resume; -inf before the first, and in self-play."""

    @property
    def evaluations_since_best(self) -> int:
        """Number of evaluations after that one."""

    def save(self, *, best: bool = False) -> Path:
        """Write a checkpoint now, which becomes `latest`, and `best` on request; `on_checkpoint` follows."""

    def write_metrics(self) -> None:
        """Write a row of metrics now; an evaluation writes its own."""


class Callback:
    """Hooks of a run. Override what you need.

    Hooks run in the learner's process, which waits for them. An exception is logged, also in `events.jsonl`, and the
    run continues.
    """

    ends_run_on_error = False
    """Whether an exception also ends the run, as `RunFailed`."""
    every_iteration = False
    """Whether `on_update` is also called after iterations without an update, with no metrics."""

    def on_start(self, run: Run) -> None:
        """The run begins, or resumes from a checkpoint."""

    def on_rollout(self, run: Run, trajectory: Trajectory) -> None:
        """The learner has received a trajectory and is about to store it; do not change its arrays."""

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Weights were updated; `metrics` are means over the updates of this iteration."""

    def on_evaluation(self, run: Run, result: Evaluation) -> None:
        """The deterministic policy was evaluated."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """A checkpoint was written."""

    def on_end(self, run: Run) -> None:
        """The run has finished, was stopped, or failed; the last checkpoint and row of metrics are written."""
