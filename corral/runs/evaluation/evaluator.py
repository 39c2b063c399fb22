"""Evaluations of a run during training: in the learner's process, or in one of their own beside it."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import cloudpickle
import numpy as np

from corral.acting.policy import PlanningPolicy
from corral.core.encoding import Value
from corral.core.errors import UserError
from corral.envs.backends.simulators.options import is_url
from corral.envs.backends.simulators.vec_env import LinkVecEnv
from corral.envs.suites.games.board_env import is_self_play
from corral.envs.vec_env import VecEnv
from corral.learn.weights import to_tensors
from corral.runs.evaluation.evaluate import Evaluation, OnStep, link_opponent, make_eval_vec, play, report_seed
from corral.runs.load import LoadedPolicy
from corral.runtimes.base import Call, Handle, Mailbox, RoleLost
from corral.runtimes.process import ProcessRuntime
from corral.topologies.base import PolicySnapshot

if TYPE_CHECKING:
    from corral.config.experiment import Experiment
    from corral.topologies.base import Topology

Note = Callable[[str, str], None]
Show = Callable[[str], None]
"""Called with what an evaluation is doing, before it and after every step of it."""
_CHEAP_S = 0.5
"""An evaluation that takes less is never left out, so that short runs have a learning curve too."""
_NICE = 10
"""Of the process of background evaluations: where cores are short, the learner comes first."""
_POLL_S = 0.2


class EvaluationStopped(BaseException):
    """The run was told to stop during an evaluation. Like KeyboardInterrupt, `except Exception` does not catch it."""


@dataclass(frozen=True)
class Evaluated:
    """An evaluation with deterministic and one with sampled actions, of the policy after `step` environment steps."""

    step: int
    result: Evaluation
    sampled: Evaluation
    self_play: bool

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "eval/return": self.result.mean,
            "eval/return_sampled": self.sampled.mean,
            "eval/return_std": self.result.std,
            "eval/length": float(np.mean(self.result.lengths)),
        }


class Evaluator:
    """Evaluates a topology's policy in this process; the environments are built once, at the first evaluation."""

    def __init__(self, topology: Topology, note: Note, show: Show = lambda text: None) -> None:
        self._topology, self._note, self.show = topology, note, show
        self._vec: VecEnv | None = None
        self._self_play = self._active = self._stopped = False
        self._last_s: float | None = None
        self.spent_s = 0.0
        """Wall time of all evaluations, also before a resume."""

    def open_early(self) -> None:
        """Build environments now if they can fail where those of training did not, so that errors show at once."""
        experiment = self._topology.experiment
        elsewhere = experiment.eval_env_kwargs or is_url(experiment.env) or self._plans()
        lone = experiment.factory is not None and experiment.num_envs == 1  # may return training's environment again
        if experiment.eval_episodes and (elsewhere or lone):
            with self._opened():
                pass

    def fits(self, wall_s: float) -> bool:
        """Whether another evaluation keeps to `eval_max_fraction`, of a run that has taken `wall_s` so far."""
        limit = self._topology.experiment.eval_limit
        cost = self._expected_s(wall_s) if self._last_s is None else self._last_s
        return limit >= 1 or cost <= _CHEAP_S or self.spent_s + cost <= limit * (wall_s + cost)

    def _expected_s(self, wall_s: float) -> float:
        """Duration of the first evaluation, at the speed of training and with episodes as long as there."""
        topology = self._topology
        envs, steps = topology.experiment.num_envs, max(1, topology.env_steps)
        length = topology.episodes.mean_length()
        if math.isnan(length):
            length = topology.spec.max_episode_steps or steps / envs
        return 2 * topology.experiment.eval_episodes * length * wall_s / steps

    def evaluate(self) -> Evaluated:
        """Evaluate now; EvaluationStopped if the run is told to stop meanwhile."""
        topology, experiment = self._topology, self._topology.experiment
        with self.interruptible(), self._opened() as vec:
            make, episodes, start = topology.eval_policy, experiment.eval_episodes, time.monotonic()
            best, sampled = (
                play(vec, make, kind, experiment, episodes, experiment.seed, on_step=self._shower(what))
                for kind, what in ((True, "evaluating"), (False, "evaluating sampled actions"))
            )
            self._last_s = time.monotonic() - start
        return Evaluated(topology.env_steps, best, sampled, self._self_play)

    def report(self, loaded: LoadedPolicy) -> Evaluation:
        """A deterministic evaluation of a saved policy with seeds that did not select it."""
        experiment, seed = self._topology.experiment, report_seed(self._topology.experiment.seed)
        show = self._shower("evaluating the best checkpoint")
        with self.interruptible(), self._opened() as vec:
            return play(vec, loaded.as_policy, True, experiment, experiment.eval_episodes, seed, on_step=show)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block that `interrupt` leaves at once, whatever it waits for."""
        start = time.monotonic()
        self._active = True
        try:
            self._check()
            yield
        finally:
            self._active = False
            self.spent_s += time.monotonic() - start

    def interrupt(self) -> None:
        """End an evaluation, and all later ones before they begin; called by a signal handler in the main thread."""
        self._stopped = True
        if self._active:
            self._check()

    def _check(self) -> None:
        if self._stopped:
            raise EvaluationStopped

    def _shower(self, what: str) -> OnStep:
        episodes = self._topology.experiment.eval_episodes

        def show(done: int, steps: int) -> None:
            self._check()  # again: an environment may have swallowed the exception
            self.show(f"{what}: {done} of {episodes} episodes, {steps:,} steps")

        show(0, 0)
        return show

    def close(self) -> None:
        if self._vec is not None:
            self._vec.close()
        self._vec = None

    def _plans(self) -> bool:
        """Whether evaluations search, which saves and restores environments."""
        topology = self._topology
        policy = topology.algo.eval_policy(topology.model, deterministic=True, rng=np.random.default_rng(0))
        return isinstance(policy, PlanningPolicy)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[VecEnv]:
        """The environments; slots of simulators that training waits for are left at the end."""
        vec = self._open()
        try:
            yield vec
        finally:
            if isinstance(vec, LinkVecEnv) and vec.borrows:
                self.close()

    def _open(self) -> VecEnv:
        if self._vec is None:
            experiment = self._topology.experiment
            self.show("building environments for evaluation")
            self._vec = make_eval_vec(experiment, experiment.eval_episodes, experiment.seed, here=self._plans())
            known, self._self_play = self._self_play, link_opponent(experiment) is None and is_self_play(self._vec)
            if self._self_play and not known:
                self._note(
                    "no_opponent",
                    "evaluation is self-play, whose returns are not comparable over time: the best checkpoint is the "
                    'latest; set eval_env_kwargs={"opponent": "mcts:1000"} if the game supports it',
                )
        return self._vec


class EvaluationRole:
    """Evaluates snapshots of a policy in a process of its own."""

    def __init__(self, experiment: Experiment, mailbox: Mailbox) -> None:
        if hasattr(os, "nice"):
            os.nice(_NICE)
        self._experiment = experiment
        self._vec: VecEnv | None = None

    def evaluate(self, weights: Value, meta: Value) -> Value:
        """Returns and lengths of both kinds of episodes, and whether they were self-play."""
        experiment = self._experiment
        loaded = LoadedPolicy(experiment, to_tensors(weights), meta, seed=0, device="run")
        if self._vec is None:
            plans = isinstance(loaded.as_policy(), PlanningPolicy)
            self._vec = make_eval_vec(experiment, experiment.eval_episodes, experiment.seed, here=plans)
        found = [
            play(self._vec, loaded.as_policy, kind, experiment, experiment.eval_episodes, experiment.seed)
            for kind in (True, False)
        ]
        return [[[*each.returns], [*each.lengths]] for each in found], is_self_play(self._vec)

    def close(self) -> None:
        if self._vec is not None:
            self._vec.close()


class BackgroundEvaluator:
    """Evaluates one snapshot of the policy at a time while training continues; the process ends with this one."""

    def __init__(self, experiment: Experiment, note: Note) -> None:
        self._note = note
        self._make = partial(EvaluationRole, experiment)
        try:
            cloudpickle.dumps(self._make)
        except Exception as error:
            raise UserError(
                f"The environment cannot be sent to the process of eval_background ({error}): omit the setting, or "
                "give the environment as module:Class."
            ) from error
        self._runtime = ProcessRuntime()
        self._handle: Handle | None = None
        self._call: Call | None = None
        self._snapshot: PolicySnapshot | None = None

    @property
    def busy(self) -> bool:
        return self._call is not None

    def start(self, snapshot: PolicySnapshot) -> None:
        """Begin to evaluate a snapshot; the previous evaluation must have been collected."""
        if self._handle is None:
            self._handle = self._runtime.spawn("evaluation", self._make)
        self._snapshot = snapshot
        self._call = self._handle.call("evaluate", snapshot.arrays(), snapshot.meta)

    def collect(self, timeout_s: float = 0.0) -> tuple[Evaluated, PolicySnapshot] | None:
        """The result, and what was evaluated, once it is there; None also if the process was lost."""
        call, snapshot = self._call, self._snapshot
        if call is None or snapshot is None or not self._runtime.wait([call], timeout_s):
            return None
        self._call = self._snapshot = None
        try:
            kinds, self_play = call.result()
        except RoleLost as lost:
            self._handle = None
            self._note("lost", f"{str(lost).splitlines()[0]}; the evaluation at step {snapshot.step:,} is left out")
            return None
        best, sampled = (Evaluation(tuple(returns), tuple(lengths)) for returns, lengths in kinds)
        return Evaluated(snapshot.step, best, sampled, self_play), snapshot

    def wait(self, evaluator: Evaluator) -> tuple[Evaluated, PolicySnapshot] | None:
        """Wait for the result of an evaluation in flight; EvaluationStopped if the run is told to stop meanwhile."""
        found, start = None, time.monotonic()
        with evaluator.interruptible():
            while self.busy and found is None:
                evaluator.show(f"waiting for the evaluation in the background: {time.monotonic() - start:.0f} s")
                found = self.collect(_POLL_S)
        return found

    def close(self) -> None:
        if self._handle is not None:
            self._handle.stop(0.0)  # with an unfinished evaluation
        self._runtime.close()
