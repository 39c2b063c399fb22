"""What planning adds when acting: a half-trained policy with and without search, and planners that do not learn.

All play the same episodes, those of evaluations with the same seeds, so that returns are compared one by one; only a
C++ simulator draws its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.cpp import SDK, CannotCompile, compile_simulator
from benchmarks.common.report import Verdict
from benchmarks.common.rounds import Spread
from corral.acting.policy import ActContext, FunctionPolicy, PlanningPolicy, Policy, bind_envs, set_context
from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.core.types import Array, Tree
from corral.envs.make import make_vec
from corral.envs.vec_env import VecEnv
from corral.planning.action_set import choose_action_set
from corral.planning.search_policy import Search
from corral.planning.shooting import Mppi, Shooting

POLICY, MPPI, MPPI_LINK = "the policy alone", "MPPI", "MPPI, C++ simulator over tcp"
AHEAD = 20
"""Horizon, in steps, of planners that do not learn."""
_SIMULATORS = 2
_MPPI_BAR = -200.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class PlanningTask:
    """An environment, and the number of training steps after which PPO is half-trained."""

    env: str
    steps: int


PENDULUM = "Pendulum-v1"
TASKS = {"cartpole": PlanningTask("CartPole-v1", 20_000), "pendulum": PlanningTask(PENDULUM, 25_000)}


@dataclass(frozen=True)
class Play:
    """Episodes of one seed: their returns, and the cost of a decision."""

    seed: int
    returns: tuple[float, ...]
    decision_s: float
    simulator_steps: float

    @property
    def mean(self) -> float:
        return mean_of(self.returns)[0]

    @property
    def half_width(self) -> float:
        """Half width of the mean's 95 % interval."""
        return mean_of(self.returns)[1]


@dataclass(frozen=True)
class PlanningFigure:
    """One way to act in a task, with every seed; `sims` is None for policies that do not simulate."""

    env: str
    name: str
    sims: int | None
    plays: Sequence[Play]

    def spread(self, what: str) -> Spread:
        """Median and range over the seeds."""
        return Spread.of(getattr(play, what) for play in self.plays)


def mean_of(values: tuple[float, ...]) -> tuple[float, float]:
    """The mean, and the half width of its 95 % interval."""
    from corral.runs.evaluation.evaluate import Evaluation

    found = Evaluation(values, ())
    return found.mean, found.half_width


def half_trained(
    task: PlanningTask, seeds: Sequence[int], sims: Sequence[int], episodes: int, folder: Path, say: Say
) -> list[PlanningFigure]:
    """Train PPO with each seed until it is half-trained, and let it act alone and with search."""
    from corral.runs.evaluation.evaluate import acting_seed, make_eval_vec
    from corral.runs.load import load_policy
    from corral.runs.train import train

    plays: dict[int | None, list[Play]] = {count: [] for count in (None, *sims)}
    for seed in seeds:
        say(f"{task.env}, seed {seed}: training PPO")
        bare: dict[str, Any] = {"eval_episodes": 0, "checkpoint_every_s": 0}
        run = train("ppo", task.env, task.steps, seed, folder / f"{task.env}-{seed}", quiet=True, **bare)
        loaded = load_policy(run.run_dir, "latest")
        loaded.use_training_threads()
        drawn = acting_seed(seed, deterministic=True)
        for count, found in plays.items():
            say(f"{task.env}, seed {seed}: {_name(count)}")
            policy = loaded.as_policy(seed=drawn) if count is None else loaded.search_policy(count, seed=drawn)
            with make_eval_vec(loaded.experiment, episodes, seed, here=True) as vec:
                found.append(_play(vec, policy, episodes, seed))
    return [PlanningFigure(task.env, _name(count), count, tuple(found)) for count, found in plays.items()]


def planners(
    task: PlanningTask, seeds: Sequence[int], sims: int, episodes: int, pendulum: Path | None, say: Say
) -> list[PlanningFigure]:
    """Let planners that do not learn act, with `sims` simulations of `AHEAD` steps per decision.

    In Pendulum these include MPPI, and MPPI on the C++ simulator `pendulum` if it is given.
    """
    from corral.runs.evaluation.evaluate import make_eval_vec

    experiment = Experiment.make("ppo", task.env)
    makers: dict[str, Callable[[VecEnv, int], Policy]] = {
        "random actions": _random,
        f"shooting, {sims} x {AHEAD} steps": lambda vec, seed: Shooting(sims, AHEAD, seed=seed),
        f"search, {sims} random rollouts of {AHEAD} steps": lambda vec, seed: Search(
            None, sims=sims, rollout_steps=AHEAD, seed=seed
        ),
    }
    if task.env == PENDULUM:
        makers |= {name: lambda vec, seed: Mppi(AHEAD, sims, seed=seed) for name in (MPPI, MPPI_LINK)}
    if pendulum is None:
        makers.pop(MPPI_LINK, None)
    figures = []
    for name, make in makers.items():
        plays = []
        for seed in seeds:
            say(f"{task.env}, seed {seed}: {name}")
            linked = pendulum if name == MPPI_LINK else None
            with _linked(linked, episodes) if linked else make_eval_vec(experiment, episodes, seed, here=True) as vec:
                plays.append(_play(vec, make(vec, seed), episodes, seed))
        figures.append(PlanningFigure(task.env, name, None if make is _random else sims, tuple(plays)))
    return figures


def compile_pendulum(folder: Path) -> Path:
    """Compile Gymnasium's Pendulum as a C++ simulator."""
    try:
        compile_simulator(SDK / "examples" / "pendulum.cpp", folder / "pendulum")
    except CannotCompile as error:
        raise UserError(
            f"MPPI is also measured on a C++ simulator, and {error}: install g++, or measure with --task cartpole."
        ) from error
    return folder / "pendulum"


def verdicts(figures: Sequence[PlanningFigure]) -> Iterator[Verdict]:
    """Whether search with the most simulations improves a half-trained policy significantly, and MPPI swings up."""
    for env in dict.fromkeys(figure.env for figure in figures):
        here = [figure for figure in figures if figure.env == env]
        alone = next((figure for figure in here if figure.name == POLICY), None)
        searched = [figure for figure in here if figure.name == _name(figure.sims)]
        if alone is not None and len(searched) > 1:
            most = max(searched, key=lambda figure: figure.sims or 0)
            gains = [_gain(a, b) for a, b in zip(most.plays, alone.plays, strict=True)]
            sure, plain = Spread.of(mean - half for mean, half in gains), Spread.of(mean for mean, _ in gains)
            bound = f"Search adds {plain.median:.1f} ({plain.low:.1f} to {plain.high:.1f}) to the mean, seed by seed."
            target = f"{env}, return that search adds to a half-trained PPO, low end of the 95 % interval"
            yield Verdict(target, 0.0, sure, most.name, bound)
        for figure in here:
            if figure.name in (MPPI, MPPI_LINK):
                yield Verdict(f"{env}, mean return", _MPPI_BAR, figure.spread("mean"), figure.name, "")


def _gain(one: Play, other: Play) -> tuple[float, float]:
    """Mean improvement over the same episodes, and the half width of its 95 % interval."""
    return mean_of(tuple(a - b for a, b in zip(one.returns, other.returns, strict=True)))


def _name(sims: int | None) -> str:
    return POLICY if sims is None else f"search, {sims} simulations"


def _random(vec: VecEnv, seed: int) -> Policy:
    actions, rng = choose_action_set(vec.spec.action, 2), np.random.default_rng(seed)
    return FunctionPolicy(lambda obs: actions.random_env_actions(len(obs), rng))


def _linked(program: Path, episodes: int) -> VecEnv:
    """Environments in C++ simulators."""
    from corral.runs.evaluation.evaluate import num_eval_envs

    count = num_eval_envs(episodes)
    simulators = min(_SIMULATORS, count)
    start = {"sim": f"{program} --connect {{url}}", "sims": simulators}
    return make_vec("tcp://127.0.0.1:0", count, workers=simulators, env_kwargs=start)


def _play(vec: VecEnv, policy: Policy, episodes: int, seed: int) -> Play:
    from corral.runs.evaluation.evaluate import evaluate_policy

    watched = _Watched(policy)
    found = evaluate_policy(vec, watched, episodes, seed)
    seconds = statistics.median(watched.seconds)  # the first ones compile
    return Play(seed, found.returns, seconds, watched.simulator_steps / watched.decisions)


class _Watched:
    """A policy whose time per decision is recorded, with many decisions in a batch."""

    def __init__(self, policy: Policy):
        self._policy, self.seconds, self.decisions = policy, list[float](), 0

    def set_context(self, ctx: ActContext) -> None:
        set_context(self._policy, ctx)

    @property
    def simulator_steps(self) -> int:
        return self._policy.simulator_steps if isinstance(self._policy, PlanningPolicy) else 0

    def bind_envs(self, vec: VecEnv) -> None:
        bind_envs(self._policy, vec)

    def initial_state(self, n: int) -> Tree:
        return self._policy.initial_state(n)

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        start = time.perf_counter()
        decided = self._policy.act(obs, state, first)
        self.seconds.append((time.perf_counter() - start) / len(first))
        self.decisions += len(first)
        return decided
