"""Stop a run when its evaluations reach a target or no longer improve."""

from __future__ import annotations

import math

from corral.core.errors import UserError
from corral.runs.callbacks.base import Callback, Run
from corral.runs.evaluation.evaluate import Evaluation


class EarlyStopping(Callback):
    """Stops when an evaluation's mean return reaches `target`, or after `patience` evaluations without a new best."""

    def __init__(self, target: float | None = None, patience: int | None = 10) -> None:
        if patience is not None and patience < 1:
            raise UserError(f"patience must be at least 1, or None, got {patience}.")
        self._target, self._patience = target, patience
        self._best, self._since_best = -math.inf, 0

    def on_start(self, run: Run) -> None:
        """A resumed run continues to count."""
        self._best, self._since_best = run.best_return, run.evaluations_since_best

    def on_evaluation(self, run: Run, result: Evaluation) -> None:
        self._since_best = 0 if result.mean > self._best else self._since_best + 1
        self._best = max(self._best, result.mean)
        if self._target is not None and result.mean >= self._target:
            run.stop(f"mean return {result.mean:g} reached the target of {self._target:g}")
        elif self._patience is not None and self._since_best >= self._patience:
            run.stop(f"no evaluation above {self._best:g} for {self._patience} evaluations")
