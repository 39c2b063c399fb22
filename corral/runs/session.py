"""Carrying out an experiment: drive its topology, and keep the run's folder while it goes."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from corral.acting.policy import PlanningPolicy
from corral.config import presets
from corral.config.experiment import Experiment
from corral.core.types import EnvSpec
from corral.envs.backends.simulators.options import is_url
from corral.envs.suites.games.board_env import has_both_sides
from corral.envs.vec_env import VecEnv
from corral.runs import checkpoint
from corral.runs.evaluate import Evaluation, acting_seed, evaluate, make_eval_vec
from corral.runs.events import EventLog
from corral.runs.folder import RunFolder, require_same_env, whole_file
from corral.runs.progress import Progress
from corral.runs.sinks.base import MetricsLog
from corral.topologies.base import make_topology

log = logging.getLogger("corral.runs")


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    run_dir: Path
    steps: int
    wall_s: float
    eval_return: float
    """Mean return of the last evaluation, deterministic; NaN when there was none."""
    version: int
    """Updates of the network."""
    train_return: float = math.nan
    """Mean return of the last 100 training episodes."""
    best_return: float = math.nan
    """Highest mean return of an evaluation."""
    stopped: bool = False
    """Whether it was told to stop before its end."""


@dataclass
class _Clock:
    """When something was last done, in steps and in time."""

    every_steps: int
    every_s: float
    last_steps: int = 0
    last_s: float = field(default_factory=time.monotonic)

    def due(self, steps: int) -> bool:
        by_steps = self.every_steps > 0 and steps // self.every_steps > self.last_steps // self.every_steps
        return by_steps or (self.every_s > 0 and time.monotonic() - self.last_s >= self.every_s)

    def done(self, steps: int) -> None:
        self.last_steps, self.last_s = steps, time.monotonic()


class TrainingLoop:
    """One process's work on a run: from its start, or from a checkpoint, to its end or until it is told to stop."""

    def __init__(self, experiment: Experiment, folder: RunFolder, *, resume: bool = False, quiet: bool = False):
        self._experiment, self._folder, self._resume, self._quiet = experiment, folder, resume, quiet
        self.began = False
        """Whether there was anything to train; if not, the folder is not worth keeping."""
        self._stop = False
        self._eval_vec: VecEnv | None = None
        self._against_itself = False  # evaluations, which then compare nothing
        self._last: Evaluation | None = None
        self._last_step = 0
        self._best = -math.inf
        self._wall_before = 0.0
        self._said: dict[str, list[Any]] = {}
        self._row_step = -1

    def run(self) -> Result:
        """Train; whatever happens, environments are closed and files are whole."""
        with self._folder.lock(), contextlib.ExitStack() as stack:
            self._events = EventLog(self._folder)
            stack.callback(self._events.close)
            saved = self._read() if self._resume else None
            self._trainer = make_topology(self._experiment, self._note)
            stack.callback(self._trainer.close)
            stack.callback(self._close_eval)
            if self._trainer.experiment != self._experiment:  # what was chosen stays chosen
                self._experiment = self._trainer.experiment
                self._folder = self._folder.write_config(self._experiment.to_dict())
            if saved is not None:
                self._load(*saved)
            start = self._trainer.env_steps
            self._metrics = MetricsLog(self._folder, purge_after=start if self._resume else None)
            stack.callback(self._metrics.close)
            self._progress = Progress(self._experiment.steps, start=start, quiet=self._quiet)
            stack.callback(self._progress.close)
            stack.enter_context(self._signals())
            evaluation = self._experiment.evaluation
            if evaluation.episodes and (evaluation.env_kwargs or is_url(self._experiment.env) or self._looks_ahead()):
                self._open_eval()  # what the environment does not take is said now, not hours later
            self._announce()
            self._start_s, self._start_steps, self.began = time.monotonic(), start, True
            try:
                self._train()
            except Exception as error:
                self._events.add("failed", f"{type(error).__name__}: {error}", env_steps=self._trainer.env_steps)
                raise
            return self._result()

    # -- the loop ---------------------------------------------------------------------------------------------

    def _train(self) -> None:
        experiment, trainer = self._experiment, self._trainer
        start = trainer.env_steps
        rows = _Clock(experiment.log.every_steps, experiment.log.every_s, start)
        saves = _Clock(experiment.checkpoints.every_steps, experiment.checkpoints.every_s, start)
        looks = _Clock(experiment.evaluate_every if experiment.evaluation.episodes else 0, 0.0, start)
        if experiment.guarded and not self._resume:  # so that there is always something to go on from
            self._save(saves, best=False)
        while trainer.env_steps < experiment.steps and not self._stop:
            for name, values in trainer.advance().items():
                self._said.setdefault(name, []).extend(values)
            steps = trainer.env_steps
            over = steps >= experiment.steps
            is_best = False
            if looks.due(steps) or (over and experiment.evaluation.episodes):
                looks.done(steps)
                is_best = self._evaluate()
            if rows.due(steps):
                rows.done(steps)
                self._write_parts()
                if steps != self._row_step:  # while lost parts are waited for, nothing changes
                    self._write_row()
            if (is_best or saves.due(steps)) and not over:  # after the row, which a resumed run would not write again
                self._save(saves, best=is_best)
            self._progress.update(steps, self._shown())
        late = self._last_step != trainer.env_steps  # saving may have let workers finish what they were at
        if late and not self._stop and experiment.evaluation.episodes:
            self._evaluate()
        if self._row_step != trainer.env_steps:
            self._write_row()
        evaluated = self._last is not None and self._last_step == trainer.env_steps and not self._against_itself
        self._save(saves, best=evaluated and self._last is not None and self._last.mean >= self._best)
        if not self._stop and not trainer.learner.version:
            self._note(
                "not_trained", "the network was never updated: the run is too short for a batch, give more steps"
            )
        self._events.add("stopped" if self._stop else "finished", "", env_steps=trainer.env_steps)

    def _looks_ahead(self) -> bool:
        """Whether evaluations are by search, which saves and restores environments."""
        trainer = self._trainer
        policy = trainer.algo.eval_policy(trainer.model, deterministic=True, rng=np.random.default_rng(0))
        return isinstance(policy, PlanningPolicy)

    def _open_eval(self) -> VecEnv:
        if self._eval_vec is None:
            experiment = self._experiment
            self._eval_vec = make_eval_vec(
                experiment, experiment.evaluation.episodes, experiment.seed, here=self._looks_ahead()
            )
            self._against_itself = has_both_sides(self._eval_vec)
            if self._against_itself:
                self._note(
                    "no_opponent",
                    "evaluations are of games against itself, which say nothing of how good it is: the best checkpoint "
                    'is the latest; set evaluation.env_kwargs={"opponent": "mcts:1000"} where the game takes it',
                )
        return self._eval_vec

    def _evaluate(self) -> bool:
        """Evaluate deterministically and by sampling; returns whether it is the best so far."""
        experiment, trainer = self._experiment, self._trainer
        vec = self._open_eval()
        results = {}
        for name, deterministic in (("eval/return", True), ("eval/return_sampled", False)):
            seed = acting_seed(experiment.seed, deterministic=deterministic)
            policy = trainer.eval_policy(deterministic=deterministic, seed=seed)
            results[name] = evaluate(vec, policy, experiment.evaluation.episodes, experiment.seed)
        self._last, self._last_step = results["eval/return"], trainer.env_steps
        self._said_once = {name: result.mean for name, result in results.items()}
        self._said_once["eval/return_std"] = self._last.std
        self._said_once["eval/length"] = float(np.mean(self._last.lengths))
        if self._against_itself:
            return False
        better = self._last.mean > self._best
        self._best = max(self._best, self._last.mean)
        return better

    # -- files -------------------------------------------------------------------------------------------------

    _said_once: dict[str, float] = {}  # noqa: RUF012 - replaced, never changed

    def _write_row(self) -> None:
        trainer, episodes = self._trainer, self._trainer.episodes
        spent = max(1e-9, time.monotonic() - self._start_s)
        values: dict[str, float] = {
            "train/return": episodes.mean_return(),
            "train/length": episodes.mean_length(),
            "train/episodes": float(episodes.finished),
            "time/steps_per_s": (trainer.env_steps - self._start_steps) / spent,
            **trainer.metrics(),
            **{name: float(np.mean([float(v) for v in said])) for name, said in self._said.items()},
            **self._said_once,
        }
        self._said.clear()
        self._said_once = {}
        self._row, self._row_step = values, trainer.env_steps
        self._metrics.write(trainer.env_steps, self._wall_s(), values)

    def _write_parts(self) -> None:
        if parts := self._trainer.parts():
            with whole_file(self._folder.parts_json) as path:
                path.write_text(json.dumps(parts))

    _row: dict[str, float] = {}  # noqa: RUF012 - replaced, never changed

    def _shown(self) -> dict[str, float]:
        shown = dict(self._row)
        shown["train/return"] = self._trainer.episodes.mean_return()
        if self._last is not None:
            shown["eval/return"] = self._last.mean
        return shown

    def _save(self, clock: _Clock, *, best: bool = False) -> None:
        trainer, start = self._trainer, time.monotonic()
        state = {
            "trainer": trainer.state_dict(replay=self._experiment.checkpoints.replay),
            "session": {
                "wall_s": self._wall_s(),
                "best": self._best,
                "row_step": self._row_step,
                "said": {name: [float(value) for value in values] for name, values in self._said.items()},
                "said_once": dict(self._said_once),
            },
        }
        meta = {
            "spec": trainer.spec.to_json(),
            "precision": trainer.precision.name,
            "evaluation": None if self._last is None else self._last.to_json() | {"step": self._last_step},
            "version": trainer.learner.version,
            "reward_scale": trainer.reward_scale,
        }
        keep = self._experiment.checkpoints.keep
        checkpoint.save(self._folder, state, trainer.env_steps, meta, keep=keep, best=best)
        clock.done(trainer.env_steps)
        # A large replay takes long to write: spend no more than a twentieth of the time on it.
        if clock.every_s:
            clock.every_s = max(self._experiment.checkpoints.every_s, 20 * (clock.last_s - start))

    def _read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The last intact checkpoint; the run goes on in the precision that it chose."""
        state, meta = checkpoint.load(self._folder, note=lambda text: self._events.add("checkpoint", text))
        self._experiment = replace(self._experiment, precision=meta["precision"])
        return state, meta

    def _load(self, state: dict[str, Any], meta: dict[str, Any]) -> None:
        require_same_env(self._trainer.spec, EnvSpec.from_json(meta["spec"]))
        restarted = self._trainer.load_state_dict(state["trainer"])
        session = state["session"]
        self._best, self._wall_before, self._row_step = session["best"], session["wall_s"], session["row_step"]
        self._said, self._said_once = session["said"], session["said_once"]
        if meta.get("evaluation"):
            record = meta["evaluation"]
            self._last = Evaluation(tuple(record["returns"]), tuple(record["lengths"]))
            self._last_step = record["step"]
        text = f"resumed at step {self._trainer.env_steps:,}"
        if restarted:
            names = ", ".join(map(str, restarted[:8])) + (", ..." if len(restarted) > 8 else "")
            text += f"; environments {names} could not be restored and start new episodes"
        elif restarted is not None:
            text += "; every environment goes on where it was"
        if state["trainer"].get("store", ()) is None and self._trainer.algo.data.reuse == "replay":
            text += "; its replay was not saved and starts empty"
        self._note("resumed", text)

    # -- around it ---------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        trainer, experiment = self._trainer, self._experiment
        params = sum(p.numel() for p in trainer.model.parameters())
        log.info(
            "%s on %s (%s), %s steps, seed %d, %d environments, %s weights on %s in %s (%s), %s; %s",
            experiment.algo, experiment.env, presets.describe(experiment.algo, experiment.preset),
            f"{experiment.steps:,}", experiment.seed, experiment.total_envs, f"{params:,}", trainer.device,
            trainer.precision.name, trainer.precision.why, trainer.thread_plan, self._folder.path,
        )  # fmt: skip

    def _note(self, kind: str, text: str) -> None:
        steps = self._trainer.env_steps if hasattr(self, "_trainer") else 0
        self._events.add(kind, text, env_steps=steps)
        log.warning("%s", text) if kind == "not_finite" else log.info("%s", text)

    def _wall_s(self) -> float:
        return self._wall_before + time.monotonic() - self._start_s

    def _close_eval(self) -> None:
        if self._eval_vec is not None:
            self._eval_vec.close()

    def _result(self) -> Result:
        trainer = self._trainer
        return Result(
            self._folder.path,
            trainer.env_steps,
            self._wall_s(),
            math.nan if self._last is None else self._last.mean,
            trainer.learner.version,
            trainer.episodes.mean_return(),
            self._best if math.isfinite(self._best) else math.nan,
            self._stop,
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the run after the turn that is under way; a second Ctrl-C ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True
            self._progress.say("stopping: saving a checkpoint first (again to stop at once)")

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
