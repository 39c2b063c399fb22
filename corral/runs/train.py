"""`corral.train` and `corral.resume`, with or without a supervised learner process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.config.experiment import Experiment
from corral.core.errors import RunFailed, UserError
from corral.runs.events import EventLog
from corral.runs.folder import RunFolder
from corral.runs.plugins import CallbackLike, Plugins, SinkLike
from corral.runs.sinks.csv import read_metrics
from corral.runs.training_loop import Result, TrainingLoop, handle_stop_signals
from corral.runtimes.base import Mailbox, MakeRole, RoleLost
from corral.runtimes.process import ProcessRuntime
from corral.runtimes.supervised_role import SupervisedRole

if TYPE_CHECKING:
    from corral.envs.resolve import EnvLike

_log = logging.getLogger(__name__)
_POLL_S = 1.0


def train(  # noqa: PLR0913 - the settings that most runs name
    algo: str,
    env: EnvLike | None = None,
    steps: int | None = None,
    seed: int | None = None,
    run_dir: str | Path | None = None,
    *,
    preset: str | None = None,
    config_file: str | Path | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    callbacks: Sequence[CallbackLike] = (),
    sinks: Sequence[SinkLike] = (),
    quiet: bool = False,
    overwrite: bool = False,
    **overrides: Any,
) -> Result:
    """Train an agent and leave a run directory.

    Args:
        algo: name of an algorithm; `corral list algos` shows them.
        env: a Gymnasium id, `module:Class`, or a factory.
        steps: environment steps.
        seed: seed of all random numbers.
        run_dir: folder of the run; default: a new one under `runs/`.
        preset: environment whose settings to start from, or "none"; default: those for `env`, if any.
        config_file: YAML with settings.
        env_kwargs: keyword arguments of the environment.
        callbacks: hooks of the run: `corral.Callback` objects, classes, or `module:Class`.
        sinks: where metrics go besides `metrics.csv` and TensorBoard: `corral.MetricSink` objects, classes, or
            `module:Class`. Naming built-in ones chooses among them: `["csv"]` writes no TensorBoard file.
        quiet: show no progress.
        overwrite: replace an existing run in `run_dir`.
        overrides: any setting, by its name: `learning_rate=1e-3`, `num_envs=16`; dotted ones as
            `**{"net.hidden_sizes": (32, 32)}`.
    """
    plugins = Plugins.find(callbacks, sinks)
    given = {"steps": steps, "seed": seed, "env_kwargs": dict(env_kwargs) if env_kwargs else None}
    settings = overrides | {key: value for key, value in given.items() if value is not None}
    experiment = Experiment.make(algo, env, preset=preset, config_file=config_file, overrides=settings)
    path = Path(run_dir) if run_dir is not None else experiment.default_run_dir()
    folder = RunFolder.create(path, experiment.to_dict(), overwrite=overwrite)
    if experiment.learner_in_own_process:
        return _run_supervised(experiment, folder, plugins, quiet=quiet)
    loop = TrainingLoop(experiment, folder, plugins, quiet=quiet)
    try:
        return loop.run()
    finally:
        if not loop.began:  # building the environments or the network failed
            folder.discard()


def resume(
    run_dir: str | Path,
    *,
    steps: int | None = None,
    callbacks: Sequence[CallbackLike] = (),
    sinks: Sequence[SinkLike] = (),
    quiet: bool = False,
) -> Result:
    """Continue a run from its last intact checkpoint; `steps` may be more than it was started with.

    Callbacks and sinks are not saved with a run: pass them again.
    """
    plugins = Plugins.find(callbacks, sinks)
    folder = RunFolder.open(run_dir)
    experiment = Experiment.from_dict(folder.config, str(folder.path / "config.yaml"))
    if steps is not None:
        if steps < experiment.steps:
            raise UserError(f"{run_dir} is set to {experiment.steps:,} steps: set at least as many, got {steps:,}.")
        # A tenth of the longer run would be another interval: keep the old one.
        experiment = replace(
            experiment, steps=steps, eval_every=experiment.eval_interval, eval_max_fraction=experiment.eval_limit
        )
    if steps is not None or folder.notes:
        with folder.lock():  # change nothing in a run that another process trains
            with contextlib.closing(EventLog(folder)) as log:
                for note in folder.notes:
                    _log.warning("%s: %s", folder.path / "config.yaml", note)
                    log.add("migrated", note)
            folder.write_config(experiment.to_dict())
    if experiment.learner_in_own_process:
        return _run_supervised(experiment, folder, plugins, resume=True, quiet=quiet)
    return TrainingLoop(experiment, folder, plugins, resume=True, quiet=quiet).run()


class LearnerRole:
    """A training loop in its own process."""

    def __init__(
        self, experiment: Experiment, path: Path, plugins: Plugins, resume: bool, quiet: bool, log_level: int,
        mailbox: Mailbox,
    ):  # fmt: skip
        logging.getLogger("corral").setLevel(log_level)
        self._loop = TrainingLoop(experiment, RunFolder.open(path), plugins, resume=resume, quiet=quiet)

    def run(self) -> dict[str, Any]:
        result = asdict(self._loop.run())
        return result | {"run_dir": str(result["run_dir"])}


def _run_supervised(
    experiment: Experiment, folder: RunFolder, plugins: Plugins, *, quiet: bool, resume: bool = False
) -> Result:
    """Run the learner in its own process; if it crashes, another one resumes from the last checkpoint."""

    def note(kind: str, text: str) -> None:  # the crashed process no longer writes
        with contextlib.closing(EventLog(folder)) as log:
            log.add(kind, text, env_steps=int(read_metrics(folder.path, last_bytes=1 << 16).get("env_steps", [0])[-1]))
        _log.warning("%s", text)

    def make(start: int) -> MakeRole:
        again = resume or (start > 0 and any(folder.checkpoints.glob("*")))
        level = logging.getLogger("corral").getEffectiveLevel()
        return partial(LearnerRole, experiment, folder.path, plugins, again, quiet, level)

    try:
        plugins.require_portable()
        with contextlib.closing(ProcessRuntime()) as runtime:
            learner = SupervisedRole(runtime, "learner", make, note, experiment.actor_learner.max_restarts)
            return _supervise(runtime, learner, folder)
    finally:
        if not resume and not any(folder.checkpoints.glob("*")):  # it did not begin
            folder.discard()


def _supervise(runtime: ProcessRuntime, learner: SupervisedRole, folder: RunFolder) -> Result:
    with _signals_passed_on(learner) as received:
        learner.call("run")
        while True:
            if received and not learner.calls:  # stopped before it could save anything
                raise KeyboardInterrupt
            if not learner.calls and learner.restart_if_due():
                learner.call("run")
            if learner.given_up:
                raise RunFailed("The learner exceeded max_restarts; the run's events.jsonl lists the causes.")
            if runtime.wait(list(learner.calls), _POLL_S):
                try:
                    result = learner.calls.popleft().result()
                    return Result(**result | {"run_dir": folder.path})
                except RoleLost as lost:
                    learner.mark_lost(str(lost))


@contextlib.contextmanager
def _signals_passed_on(learner: SupervisedRole) -> Iterator[list[int]]:
    """Forward SIGTERM and Ctrl-C to the learner; a second one ends everything at once. Yields the signals received."""
    received: list[int] = []

    def stop(number: int) -> None:
        pid = learner.status()["pid"]
        if received or pid is None:
            raise KeyboardInterrupt
        received.append(number)
        os.kill(pid, signal.SIGTERM)

    with handle_stop_signals(stop):
        yield received
