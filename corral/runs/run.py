"""A run in progress: its counters, metrics, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corral.config.experiment import Experiment
from corral.config.migrate import metric_name
from corral.core.errors import UserError
from corral.runs.callbacks.dispatch import Dispatcher
from corral.runs.checkpoints import checkpoint
from corral.runs.evaluation.evaluate import Evaluation
from corral.runs.evaluation.evaluator import BackgroundEvaluator, Evaluated, EvaluationStopped, Evaluator
from corral.runs.folder import RunFolder, atomic_path
from corral.runs.load import LoadedPolicy
from corral.runs.sinks.base import STEP, WALL_S, MetricSinks
from corral.topologies.base import PolicySnapshot, Topology


class ActiveRun:
    """The `Run` passed to callbacks; `saved` is the (state, metadata) of the checkpoint to resume from."""

    def __init__(
        self,
        folder: RunFolder,
        topology: Topology,
        evaluator: Evaluator,
        sinks: MetricSinks,
        callbacks: Dispatcher,
        saved: tuple[dict[str, Any], dict[str, Any]] | None = None,
        background: BackgroundEvaluator | None = None,
    ) -> None:
        self._folder, self._topology = folder, topology
        self._evaluator, self._background = evaluator, background
        self._sinks, self._callbacks = sinks, callbacks
        self.stop_reason: str | None = None
        self.last_evaluation: Evaluation | None = None
        self.evaluated_at = 0  # environment steps at the last evaluation
        self.is_best, self.best_return, self.best_step = False, -math.inf, 0
        self.best_report: Evaluation | None = None
        """Evaluation of the best checkpoint at the end, with seeds that did not select it."""
        self.evaluations_since_best = self.evaluations_left_out = 0
        self._pending: dict[str, list[Any]] = {}  # values of metrics since the last row
        self._pending_evaluation: dict[str, float] = {}
        self._latest: dict[str, Sequence[Any]] = {}  # values of the last iteration, whose means are computed on demand
        self._logged = False  # whether a callback has logged a value since the last row
        self._row_step, self._wall_before = -1, 0.0
        self._start_s, self._start_steps = time.monotonic(), topology.env_steps
        if saved is not None:
            self._load(*saved)

    @property
    def steps(self) -> int:
        return self._topology.env_steps

    @property
    def config(self) -> Experiment:
        return self._topology.experiment

    @property
    def run_dir(self) -> Path:
        return self._folder.path

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._counters() | _means(self._latest)

    @property
    def learning_rate(self) -> float:
        return self._topology.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.set_learning_rate(value)

    def set_learning_rate(self, value: float | None, group: str | None = None) -> None:
        self._topology.set_learning_rate(value, group)

    def log(self, name: str, value: float) -> None:
        if not isinstance(name, str):
            raise UserError(f"log takes the name of a metric and a number, got {name!r} as the name.")
        if name in (STEP, WALL_S):
            raise ValueError(f"{name} is written by the run itself: choose another name for the metric")
        self._logged = True
        self._latest[name] = [float(value)]
        self._pending.setdefault(name, []).append(float(value))

    def stop(self, reason: str) -> None:
        if "on_end" not in self._callbacks.active:  # it has finished
            self.stop_reason = self.stop_reason or reason

    def advance(self) -> None:
        if self._background is not None and self._background.busy:
            self._record_background(self._background.collect())
        updates = self._topology.advance()
        for name, values in updates.items():
            self._pending.setdefault(name, []).extend(values)
        self._latest |= updates
        self._callbacks.on_update(self, _means(updates) if self._callbacks.uses("on_update") else {})

    def _refuse_in(self, hooks: Sequence[str], what: str) -> None:
        if found := set(hooks) & set(self._callbacks.active):
            raise UserError(f"{what} cannot be called in {found.pop()}: call it in on_update.")

    def evaluate(self) -> Evaluation:
        self._refuse_in(["on_evaluation"], "evaluate()")
        if not self.config.eval_episodes:
            raise UserError("evaluate() plays eval_episodes, which are 0: set at least 1.")
        found = self._evaluator.evaluate()
        self._record(found, None if self._background is None else self._topology.snapshot())
        return found.result

    def evaluate_on_schedule(self, last: bool) -> None:
        """Evaluate if there is time for it, or beside training; in any case if it is the last time."""
        if last:
            with contextlib.suppress(EvaluationStopped):
                if self._background is not None:
                    self._record_background(self._background.wait(self._evaluator))
                self.evaluate()
        elif self._background is not None and not self._background.busy:
            self._background.start(self._topology.snapshot())
        elif self._background is None and self._evaluator.fits(self.wall_s):
            with contextlib.suppress(EvaluationStopped):
                self.evaluate()
        else:
            self.evaluations_left_out += 1

    def _record_background(self, found: tuple[Evaluated, PolicySnapshot] | None) -> None:
        if found is not None:
            self._record(*found)

    def _record(self, found: Evaluated, snapshot: PolicySnapshot | None) -> None:
        """Record a result; the best of the given snapshots is saved here, as training may have gone on meanwhile."""
        result, now = found.result, found.step == self.steps
        self._latest |= {name: [value] for name, value in found.metrics.items()}
        self.last_evaluation, self.evaluated_at = result, found.step
        if not found.self_play:
            self.is_best = result.mean > self.best_return
            if self.is_best:
                self.best_return, self.best_step = result.mean, found.step
            self.evaluations_since_best = 0 if self.is_best else self.evaluations_since_best + 1
            if self.is_best and snapshot is not None:
                meta = snapshot.meta | {"evaluation": self._last_record()}
                checkpoint.save_policy(self._folder, snapshot.weights, snapshot.step, meta)
        self._pending_evaluation = found.metrics if now else {}
        try:
            self._callbacks.on_evaluation(self, result)
        finally:  # now, so that the row has the step of the evaluation
            if now:
                self.write_metrics()
            else:
                self._sinks.write(found.step, self.wall_s, found.metrics)

    def write_metrics(self) -> None:
        """Write a row of metrics; a step has a second one only for an evaluation or logged values that came later."""
        if processes := self._topology.processes():
            # `corral top` can do without; on a full disk the row below ends the run.
            with contextlib.suppress(UserError), atomic_path(self._folder.processes_json) as path:
                path.write_text(json.dumps(processes))
        # While the run waits for disconnected processes, the step stays the same.
        if self.steps == self._row_step and not (self._pending_evaluation or self._logged):
            return
        row = self._counters() | _means(self._pending) | self._pending_evaluation
        self._pending, self._pending_evaluation, self._logged = {}, {}, False
        self._row_step = self.steps
        self._sinks.write(self.steps, self.wall_s, row)

    def _counters(self) -> dict[str, float]:
        episodes = self._topology.episodes
        spent = max(1e-9, time.monotonic() - self._start_s)
        return {
            "train/return": episodes.mean_return(),
            "train/length": episodes.mean_length(),
            "train/episodes": float(episodes.finished),
            "time/steps_per_s": (self.steps - self._start_steps) / spent,
            **self._topology.metrics(),
        }

    def save(self, *, best: bool = False, envs: bool = True) -> Path:
        # In on_rollout the steps are counted, but the trajectory is not stored yet.
        self._refuse_in(["on_rollout", "on_checkpoint"], "save()")
        if self._pending_evaluation:  # saved by `on_evaluation`: a resumed run would write the row at a later step
            self.write_metrics()
        topology = self._topology
        trainer = topology.state_dict(replay=self.config.save_replay_buffer, envs=envs)
        state = {"trainer": trainer, "session": self._state()}
        meta = topology.policy_meta | {"evaluation": self._last_record()}
        path = checkpoint.save(
            self._folder, state, topology.env_steps, meta, keep=self.config.keep_checkpoints, best=best
        )
        self._callbacks.on_checkpoint(self, path)
        return path

    def _last_record(self) -> dict[str, Any] | None:
        last = self.last_evaluation
        return None if last is None else last.to_json() | {"step": self.evaluated_at}

    def finish(self) -> None:
        # Saving may have let workers finish their work, after the evaluation that ended the run.
        if self.evaluated_at != self.steps and self.stop_reason is None and self.config.eval_episodes:
            self.evaluate_on_schedule(True)
        self.write_metrics()
        self.save(best=math.isfinite(self.best_return) and self.best_step == self.steps)
        if self.stop_reason is None and math.isfinite(self.best_return) and self.config.eval_episodes:
            with contextlib.suppress(EvaluationStopped):
                saved = checkpoint.load(self._folder, "best", only=checkpoint.POLICY)
                self.best_report = self._evaluator.report(LoadedPolicy(self.config, *saved, seed=0, device="run"))

    def finish_without_envs(self) -> None:
        """Save what there is while the environments do not answer."""
        self.write_metrics()
        self.save(envs=False)

    @property
    def wall_s(self) -> float:
        """Seconds of training, including before a resume."""
        return self._wall_before + time.monotonic() - self._start_s

    def _state(self) -> dict[str, Any]:
        return {
            "wall_s": self.wall_s,
            "best": self.best_return,
            "best_step": self.best_step,
            "since_best": self.evaluations_since_best,
            "evaluations": {"wall_s": self._evaluator.spent_s, "left_out": self.evaluations_left_out},
            "row_step": self._row_step,
            "said": {name: [float(value) for value in values] for name, values in self._pending.items()},
            "said_once": {},  # an evaluation without a row, in checkpoints of earlier versions
        }

    def _load(self, state: dict[str, Any], meta: dict[str, Any]) -> None:
        session = state["session"]
        self.best_return, self._wall_before = session["best"], session["wall_s"]
        self.best_step = session.get("best_step", 0)
        self.evaluations_since_best = session.get("since_best", 0)
        evaluations = session.get("evaluations", {"wall_s": 0.0, "left_out": 0})
        self._evaluator.spent_s, self.evaluations_left_out = evaluations["wall_s"], evaluations["left_out"]
        self._row_step = session["row_step"]
        self._pending = {metric_name(name): values for name, values in session["said"].items()}
        if record := meta.get("evaluation"):
            self.last_evaluation = Evaluation(tuple(record["returns"]), tuple(record["lengths"]))
            self.evaluated_at = record["step"]
            self._latest["eval/return"] = [self.last_evaluation.mean]
        if session["said_once"]:
            self._sinks.write(self.evaluated_at, self._wall_before, session["said_once"])


def _means(values: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    return {name: float(np.mean([float(value) for value in found])) for name, found in values.items()}
