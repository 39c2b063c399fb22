"""The training loop: build the run, iterate until it ends or is stopped, and save the result."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.config import presets
from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.core.portable import STOP_SIGNALS, signal_main_thread, survive_realtime_signals
from corral.core.types import EnvSpec
from corral.learn.threads import own_threads
from corral.nets.network import describe_encoding
from corral.runs.callbacks.clocks import Checkpoints, EvaluationClock, MetricsClock
from corral.runs.callbacks.dispatch import Dispatcher
from corral.runs.callbacks.progress import Progress
from corral.runs.callbacks.slow_calls import SlowCalls
from corral.runs.changes import describe_changes
from corral.runs.checkpoints import checkpoint
from corral.runs.checkpoints.warm_start import load_start
from corral.runs.evaluation.evaluator import BackgroundEvaluator, Evaluator
from corral.runs.events import EventLog
from corral.runs.folder import RunFolder, require_same_env
from corral.runs.plugins import Plugins
from corral.runs.run import ActiveRun
from corral.runs.sinks.base import MetricSinks
from corral.topologies.base import StoppedWaiting, Topology, make_topology

log = logging.getLogger("corral.runs")
_MUCH_MORE = 1.1  # times the steps that a run was asked for


@dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    run_dir: Path
    steps: int
    wall_s: float
    eval_return: float  # deterministic mean return of the last evaluation; NaN if there was none
    version: int  # number of updates
    train_return: float = math.nan  # mean return of the last 100 training episodes
    best_return: float = math.nan  # highest mean return of an evaluation, which selected the best checkpoint
    best_step: int = 0  # when that was
    best_report: float = math.nan  # mean return of the best checkpoint with other seeds
    eval_episodes: int = 0
    stopped: bool = False  # by a signal or a callback
    stop_reason: str = ""


Saved = tuple[dict[str, Any], dict[str, Any]]
"""State and meta data of a checkpoint."""
_STOP_S = 10.0  # for the steps of the current iteration, after a signal
_NOT_IMPORTABLE = {
    "environment": "only this script can build the environment, so `corral resume`, `eval` and `record` cannot: train "
    "with module:Class, or give env to corral.resume, corral.evaluate and corral.record",
    "algorithm": "only this script has the algorithm, so `corral resume`, `eval` and `record` cannot load the run: "
    "move it and its Config into a module, and train with module:Class",
}
_LOCAL = "not_importable"
_WARNINGS = (
    "migrated",
    "changed",
    "not_finite",
    "masks_ignored",
    "callback_error",
    "unknown_hook",
    "slow_callback",
    "sink_error",
    "slow_sink",
    _LOCAL,
)


class TrainingLoop:
    """Trains a run in this process, from the start or from a checkpoint."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        plugins: Plugins | None = None,
        *,
        resume: bool = False,
        quiet: bool = False,
    ):
        self._given_path, self._cwd = folder.path, Path.cwd()
        folder = replace(folder, path=folder.path.absolute())  # an environment may change the working directory
        self._experiment, self._folder, self._plugins = experiment, folder, plugins or Plugins()
        self._resume, self._quiet = resume, quiet
        self._warned_of_masks, self._may_replace = False, not resume
        self._gave_up_waiting = False
        self.began = False  # False: nothing was trained, so the run folder may be removed

    def run(self) -> Result:
        """Train. Environments and files are closed in any case."""
        with self._folder.lock(), own_threads(), contextlib.ExitStack() as stack:
            run = self._build(stack)
            self._announce()
            self.began = True
            try:
                self._callbacks.on_start(run)
                while run.steps < self._experiment.steps and run.stop_reason is None:
                    run.advance()
                    self._warn_of_masks()
                    self._drop_replaced(run)
                run.finish()
            except StoppedWaiting:
                self.began = run.steps > 0
                if not self._gave_up_waiting:
                    raise
                run.finish_without_envs()
            except KeyboardInterrupt:
                self.began = run.steps > 0
                raise
            except Exception as error:
                self.began = run.steps > 0 or not isinstance(error, (UserError, MemoryError))
                with contextlib.suppress(Exception):  # the first error is the one to show
                    self._events.add("failed", f"{type(error).__name__}: {error}", env_steps=run.steps)
                with contextlib.suppress(Exception):
                    self._callbacks.on_end(run)
                raise
            if run.stop_reason is None and not self._topology.learner.version:
                self._note(
                    "not_trained", "the network was never updated, the run ended before a first batch: raise steps"
                )
            self._note_left_out(run)
            kind = "finished" if run.stop_reason is None else "stopped"
            self._events.add(kind, run.stop_reason or "", env_steps=run.steps)
            self._callbacks.on_end(run)
            return self._result(run)

    def _build(self, stack: contextlib.ExitStack) -> ActiveRun:
        """Build the run, with the state of its checkpoint if it resumes; `stack` closes it."""
        self._events = EventLog(self._folder)
        stack.callback(self._events.close)
        users, given = self._plugins.make_callbacks(), self._experiment
        saved = self._read_checkpoint() if self._resume else None
        topology = self._topology = make_topology(
            self._experiment, self._note, lambda trajectory: self._callbacks.on_rollout(self._run, trajectory)
        )
        stack.callback(topology.close)
        self._experiment = topology.experiment
        if saved is not None:
            self._restore(topology, *saved)
        elif self._experiment.init is not None:
            self._note("initialised", load_start(topology, self._experiment.init))
        start, config = topology.env_steps, self._experiment
        self._progress = Progress(config.steps, start=start, quiet=self._quiet)
        stack.callback(self._progress.close)
        evaluator = self._evaluator = Evaluator(
            topology, self._note, lambda text: self._progress.busy(topology.env_steps, text)
        )
        stack.callback(evaluator.close)
        evaluator.open_early()
        # Without plugins nothing needs a thread, which would make forking unsafe.
        self._slow_calls = SlowCalls(self._note, enabled=bool(self._plugins.callbacks or self._plugins.sinks))
        stack.callback(self._slow_calls.close)
        sinks = MetricSinks(
            self._plugins.make_sinks(self._folder, start if self._resume else None),
            lambda text: self._note("sink_error", text),
            self._slow_calls,
        )
        stack.callback(sinks.close)
        # A learner that restarts after a crash needs a checkpoint from the start.
        save_first = config.learner_in_own_process and not self._resume
        evaluate = EvaluationClock(config, lambda last: self._run.evaluate_on_schedule(last))
        own = [evaluate, MetricsClock(config), Checkpoints(config, save_first=save_first)]
        self._callbacks = Dispatcher(users, [*own, self._progress], self._note, self._slow_calls)
        stack.callback(self._callbacks.close)
        background = None
        if config.eval_background and config.eval_episodes:
            background = BackgroundEvaluator(config, self._note)
            stack.callback(background.close)
        self._record_settings(given)
        self._run = ActiveRun(self._folder, topology, evaluator, sinks, self._callbacks, saved, background)
        stack.enter_context(self._signals())
        return self._run

    def _record_settings(self, given: Experiment) -> None:
        """Note which of the given settings are not those of the last start, and write them with what `auto` chose.

        Called when everything is built: a run that cannot be resumed with new settings keeps its own.
        """
        notes = [("migrated", note) for note in self._folder.notes]
        if self._resume and (changes := describe_changes(Experiment.from_dict(self._folder.config), given)):
            notes.append(("changed", changes))
        for kind, note in notes:
            self._note(kind, note)
        if notes or self._experiment != given:
            self._folder = self._folder.write_config(self._experiment.to_dict())

    def _drop_replaced(self, run: ActiveRun) -> None:
        """Remove the run that this one replaces, once it has made a step."""
        if self._may_replace and run.steps:
            self._folder.drop_replaced()
            self._may_replace = False

    def _note_left_out(self, run: ActiveRun) -> None:
        count, config = run.evaluations_left_out, run.config
        if not count:
            return
        which = "they" if count > 1 else "it"
        why = (
            f"{which} would have taken more than {100 * config.eval_limit:g} % of the time: set eval_every to have all"
        )
        if config.eval_background:
            why = "the one before was still running: set a larger eval_every"
        self._note("evaluations_left_out", f"{count} evaluation{'s' * (count != 1)} left out, because {why}")

    def _read_checkpoint(self) -> Saved:
        """The last intact checkpoint; the run continues in its precision."""
        state, meta = checkpoint.load(self._folder, note=lambda text: self._events.add("checkpoint", text))
        self._experiment = replace(self._experiment, precision=meta["precision"])
        return state, meta

    def _restore(self, topology: Topology, state: dict[str, Any], meta: dict[str, Any]) -> None:
        require_same_env(topology.spec, EnvSpec.from_json(meta["spec"]))
        restarted = topology.load_state_dict(state["trainer"])
        text = f"resumed at step {topology.env_steps:,}"
        if restarted:
            names = ", ".join(map(str, restarted[:8])) + (", ..." if len(restarted) > 8 else "")
            text += f"; environments {names} could not be restored and start new episodes"
        elif restarted is not None:
            text += "; every environment continues its episode"
        if state["trainer"].get("store", ()) is None and topology.algo.data.reuse == "replay":
            text += "; the replay buffer was not saved and starts empty"
        self._note("resumed", text)
        if topology.env_steps >= self._experiment.steps:
            path, steps = self._given_path, topology.env_steps
            log.info("%s is finished; continue it with `corral resume %s --steps %d`", path, path, 2 * steps)

    def _announce(self) -> None:
        topology, experiment = self._topology, self._experiment
        params = sum(p.numel() for p in topology.model.parameters())
        lines = [
            f"{experiment.algo} on {experiment.env}, "
            f"{presets.describe(experiment.algo, experiment.preset, experiment.steps)}",
            f"{self._planned_steps()}, seed {experiment.seed}, {experiment.num_envs} environments",
            f"network of {params:,} weights on {topology.learner.device}, "
            f"{topology.precision.name} ({topology.precision.why})",
            topology.thread_plan,
            f"run {self._given_path}",
        ]
        if encoding := describe_encoding(topology.model):
            lines.insert(3, f"observations: {encoding} (net.obs_encoding=auto, scaled or raw)")
        for line in lines:
            log.info("%s", line)
        if "://" in experiment.env and experiment.backend != "auto":
            log.info("backend=%s is not used: the simulators at %s run elsewhere", experiment.backend, experiment.env)
        for kind, what in (("environment", experiment.factory), ("algorithm", experiment.algo_class)):
            if what is not None and not self._resume:
                self._note(_LOCAL, _NOT_IMPORTABLE[kind])
        if self._callbacks.uses("on_rollout") and not topology.sees_rollouts:
            self._note("no_rollouts", f"on_rollout is not called: {experiment.topology} trajectories stay in workers")

    def _planned_steps(self) -> str:
        """Steps of the run; those of whole rollouts, where they are clearly more than it was asked for."""
        experiment, algo = self._experiment, self._topology.algo
        text, rollout = f"{experiment.steps:,} steps", algo.fragment_steps(experiment.num_envs)
        rows = rollout * experiment.num_envs
        whole = math.ceil(experiment.steps / rows) * rows
        if experiment.topology != "sync" or whole < _MUCH_MORE * experiment.steps:
            return text
        return f"{text}, rounded up to {whole:,} by whole rollouts of {rollout:,} x {experiment.num_envs}"

    def _warn_of_masks(self) -> None:
        """Say once if environments show masks of their legal actions and the algorithm ignores them."""
        topology = self._topology
        if not topology.shows_masks or topology.algo.uses_action_masks or self._warned_of_masks:
            return
        self._warned_of_masks = True
        self._note(
            "masks_ignored",
            f"{topology.spec.name} shows action masks, and {self._experiment.algo} ignores them: let the environment "
            "accept the actions that they exclude, for example without effect or with a penalty",
        )

    def _note(self, kind: str, text: str) -> None:
        topology: Topology | None = getattr(self, "_topology", None)  # it also calls this while it is built
        steps = 0 if topology is None else topology.env_steps
        if kind == "fault":  # the VecEnv has logged it, with its traceback
            self._events.add_similar(kind, text, env_steps=steps)
        else:
            self._events.add(kind, text, env_steps=steps)
            log.log(logging.WARNING if kind in _WARNINGS else logging.INFO, "%s", text)

    def _result(self, run: ActiveRun) -> Result:
        topology = self._topology
        return Result(
            self._given_path if Path.cwd() == self._cwd else self._folder.path,
            run.steps,
            run.wall_s,
            math.nan if run.last_evaluation is None else run.last_evaluation.mean,
            topology.learner.version,
            topology.episodes.mean_return(),
            run.best_return if math.isfinite(run.best_return) else math.nan,
            run.best_step,
            math.nan if run.best_report is None else run.best_report.mean,
            run.config.eval_episodes,
            run.stop_reason is not None,
            run.stop_reason or "",
        )

    def _signals(self) -> contextlib.AbstractContextManager[None]:
        """Stop signals end the run after the current iteration; a second one ends it at once, and so does the first
        before there is anything to save, or if environments keep the iteration waiting.
        """
        received: list[int] = []

        def stop(number: int) -> None:
            if received or not self._run.steps:
                raise KeyboardInterrupt
            received.append(number)
            timer = threading.Timer(_STOP_S, self._end_wait)
            timer.daemon = True
            timer.start()
            self._run.stop(signal.Signals(number).name)
            call = self._slow_calls.current
            wait = "saving a checkpoint first" if call is None else f"waiting for the {call}"
            self._progress.say(f"stopping: {wait} (interrupt again to stop immediately)")
            self._evaluator.interrupt()  # last: during an evaluation it raises

        return handle_stop_signals(stop)

    def _end_wait(self) -> None:
        """Interrupt an iteration that still waits for environments, and save without their states."""
        if not self._topology.awaits_envs:
            return
        saves = self._topology.saves_without_envs
        how = "the checkpoint is without their episodes" if saves else "the last checkpoint remains"
        log.warning("stopping: the environments have not answered for %.0f s; %s", _STOP_S, how)
        self._gave_up_waiting = saves
        signal_main_thread(signal.SIGTERM)


@contextlib.contextmanager
def handle_stop_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Call `stop` on stop signals within the block; in the main thread only, since others get none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    survive_realtime_signals()
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    # Signals ignored after `&` stay ignored.
    before = {number: signal.signal(number, lambda number, frame: stop(number)) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
