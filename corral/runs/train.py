"""`corral.train` and `corral.resume`, with or without a supervised learner process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.config.experiment import Experiment
from corral.core.errors import RunFailed, UserError
from corral.core.log import print_only_errors
from corral.runs.changes import change_settings, give_env
from corral.runs.checkpoints.warm_start import resolve_start
from corral.runs.events import EventLog
from corral.runs.folder import RunFolder
from corral.runs.load import stored_experiment
from corral.runs.plugins import CallbackLike, Plugins, SinkLike
from corral.runs.sinks.csv import read_metrics
from corral.runs.training_loop import Result, TrainingLoop, handle_stop_signals
from corral.runtimes.base import Mailbox, MakeRole, RoleLost
from corral.runtimes.process import ProcessRuntime
from corral.runtimes.supervised_role import SupervisedRole

if TYPE_CHECKING:
    from corral.algos.base import Algorithm
    from corral.envs.resolve import EnvLike

_log = logging.getLogger(__name__)
_POLL_S = 1.0


def train(  # noqa: PLR0913 - the settings that most runs name
    algo: str | type[Algorithm],
    env: EnvLike | None = None,
    steps: int | None = None,
    seed: int | None = None,
    run_dir: str | Path | None = None,
    *,
    init: str | Path | None = None,
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
        algo: name of an algorithm, which `corral list algos` shows, or a class of your own.
        env: a Gymnasium id, `module:Class`, or a factory.
        steps: environment steps.
        seed: seed of all random numbers.
        run_dir: folder of the run; default: a new one under `runs/`.
        init: a run, or one of its checkpoints, whose weights and statistics of observations the network starts from;
            default: its best checkpoint. The algorithm may be another one with the same network.
        preset: environment whose settings to start from, or "none"; default: those for `env`, if any.
        config_file: YAML with settings.
        env_kwargs: keyword arguments of the environment.
        callbacks: hooks of the run: `corral.Callback` objects, classes, or `module:Class`.
        sinks: where metrics go besides `metrics.csv` and TensorBoard: `corral.MetricSink` objects, classes, or
            `module:Class`. Naming built-in ones chooses among them: `["csv"]` writes no TensorBoard file.
        quiet: print nothing; warnings are in `events.jsonl`.
        overwrite: replace an existing run in `run_dir`.
        overrides: any setting, by its name: `learning_rate=1e-3`, `num_envs=16`; dotted ones as
            `**{"net.hidden_sizes": (32, 32)}`.
    """
    given = {"steps": steps, "seed": seed, "env_kwargs": dict(env_kwargs) if env_kwargs else None}
    settings = overrides | {key: value for key, value in given.items() if value is not None}
    if init is not None:
        settings["init"] = str(init)
    with _verbosity(quiet):
        plugins = Plugins.find(callbacks, sinks)
        experiment = Experiment.make(algo, env, preset=preset, config_file=config_file, overrides=settings)
        if experiment.init is not None:
            experiment = replace(experiment, init=resolve_start(experiment.init))
        path = Path(run_dir) if run_dir is not None else experiment.default_run_dir()
        _require_other(path, experiment.init if overwrite else None)
        folder = RunFolder.create(path, experiment.to_dict(), overwrite=overwrite)
        if experiment.learner_in_own_process:
            return _run_supervised(experiment, folder, plugins, quiet=quiet)
        loop = TrainingLoop(experiment, folder, plugins, quiet=quiet)
        try:
            return loop.run()
        finally:
            if loop.began:
                folder.drop_replaced()
            else:  # building the environments or the network failed
                folder.discard()


def _require_other(path: Path, start: str | None) -> None:
    if start is not None and Path(start).is_relative_to(path.resolve()):
        raise UserError(f"{path} cannot be replaced by a run that starts from it: choose a different --run-dir.")


def resume(
    run_dir: str | Path,
    *,
    steps: int | None = None,
    env: Callable[..., Any] | None = None,
    callbacks: Sequence[CallbackLike] = (),
    sinks: Sequence[SinkLike] = (),
    quiet: bool = False,
    **overrides: Any,
) -> Result:
    """Continue a run from its last intact checkpoint; one that is finished needs more `steps`.

    Args:
        run_dir: the run's folder.
        steps: environment steps of the whole run, at least as many as it was started with.
        env: the environment of a run that was trained with a factory of its script: this factory again.
        callbacks: hooks of the run, which are not saved with it.
        sinks: where metrics go, which is not saved with it.
        quiet: print nothing.
        overrides: settings to change, such as `learning_rate=1e-4` or `actors=4`; not those by which the network or
            the saved data is laid out. The changes are written to `config.yaml` and `events.jsonl`.
    """
    with _verbosity(quiet):
        plugins = Plugins.find(callbacks, sinks)
        folder = RunFolder.open(run_dir)
        stored = stored_experiment(folder)
        experiment = stored if env is None else give_env(stored, env)
        given = overrides | ({} if steps is None else {"steps": steps})
        experiment = change_settings(experiment, given, folder) if given else experiment
        experiment.environment()  # refused before anything is written
        if experiment.learner_in_own_process:
            return _run_supervised(experiment, folder, plugins, resume=True, quiet=quiet)
        return TrainingLoop(experiment, folder, plugins, resume=True, quiet=quiet).run()


def _last_step(folder: RunFolder) -> int:
    return int(read_metrics(folder.path, last_bytes=1 << 16).get("env_steps", [0])[-1])


def _verbosity(quiet: bool) -> contextlib.AbstractContextManager[None]:
    return print_only_errors() if quiet else contextlib.nullcontext()


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
            log.add(kind, text, env_steps=_last_step(folder))
        _log.warning("%s", text)

    def make(start: int) -> MakeRole:
        again = resume or (start > 0 and any(folder.checkpoints.glob("*")))
        level = logging.ERROR if quiet else logging.getLogger("corral").getEffectiveLevel()
        return partial(LearnerRole, experiment, folder.path, plugins, again, quiet, level)

    try:
        plugins.require_portable()
        with contextlib.closing(ProcessRuntime(experiment.actor_learner.silence_timeout_s)) as runtime:
            learner = SupervisedRole(runtime, "learner", make, note, experiment.actor_learner.max_restarts)
            return _supervise(runtime, learner, folder)
    finally:
        if not resume and not any(folder.checkpoints.glob("*")):  # it did not begin
            folder.discard()
        elif not resume:
            folder.drop_replaced()


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
        if received or not learner.alive:
            raise KeyboardInterrupt
        received.append(number)
        learner.terminate()

    with handle_stop_signals(stop):
        yield received
