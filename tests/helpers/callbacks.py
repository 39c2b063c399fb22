"""Callbacks and sinks that write what they see into a file, so that they also work in other processes."""

import json
import os
import time
from pathlib import Path

import corral


class Recorder(corral.Callback):
    """Appends one line per hook to `hooks.jsonl` in the run's folder."""

    def _add(self, run, hook, **values):
        with open(run.run_dir / "hooks.jsonl", "a") as file:
            file.write(json.dumps({"hook": hook, "steps": run.steps, "pid": os.getpid(), **values}) + "\n")

    def on_start(self, run):
        self._add(run, "on_start")

    def on_rollout(self, run, trajectory):
        self._add(run, "on_rollout", shape=list(trajectory.shape))

    def on_update(self, run, metrics):
        run.log("mine/value", run.steps)
        self._add(run, "on_update", metrics=sorted(metrics))

    def on_evaluation(self, run, result):
        self._add(run, "on_evaluation", mean=result.mean, known=run.metrics["eval/return"])

    def on_checkpoint(self, run, path):
        self._add(run, "on_checkpoint", path=str(path), whole=(path / "manifest.json").exists())

    def on_end(self, run):
        self._add(run, "on_end")


class Raising(corral.Callback):
    """Raises in every update."""

    def on_update(self, run, metrics):
        raise ValueError("no such thing")


class RaisingAndEnding(Raising):
    """The same, and that ends the run."""

    ends_run_on_error = True


class Stopping(corral.Callback):
    """Stops the run after 500 steps."""

    def on_update(self, run, metrics):
        if run.steps >= 500:
            run.stop("500 steps are enough")


class Blocking(corral.Callback):
    """Blocks for ever in its first update."""

    def on_update(self, run, metrics):
        (run.run_dir / "blocked").touch()
        while True:
            time.sleep(0.05)


class Lines(corral.MetricSink):
    """Writes rows to `rows.jsonl` in the working directory."""

    def __init__(self, path="rows.jsonl"):
        self.path = Path(path)

    def write(self, step, values):
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


class Rows(corral.MetricSink):
    """Keeps its rows in memory."""

    def __init__(self):
        self.rows = []

    def write(self, step, values):
        self.rows.append((step, values))


class RaisingSink(corral.MetricSink):
    """Raises from its second row on."""

    rows = 0

    def write(self, step, values):
        self.rows += 1
        if self.rows > 1:
            raise OSError("the server is gone")
