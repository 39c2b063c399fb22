"""Evaluation: whole episodes with seeds of their own, apart from training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.acting.policy import Policy, bind_envs, to_numpy
from corral.core import seeding
from corral.core.errors import UserError
from corral.core.types import Tree, tree_map
from corral.envs.backends.simulators.options import external_vec_env, is_url
from corral.envs.make import make_vec
from corral.envs.supervision import Supervision
from corral.envs.vec_env import VecEnv
from corral.runs.load import LoadedPolicy

if TYPE_CHECKING:
    from corral.config.experiment import Experiment

_MAX_ENVS = 16
_LONGEST = 100_000
"""Steps after which an episode is counted as it stands, so that one that never ends does not hold up a run."""
# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
      2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip

_log = logging.getLogger("corral.runs")


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of whole episodes, in the game's own reward."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Standard deviation of the returns."""
        return float(np.std(self.returns))

    @property
    def half_width(self) -> float:
        """Half of the 95 % confidence interval of the mean, by Student's t; NaN for one episode."""
        freedom = len(self.returns) - 1
        if freedom < 1:
            return float("nan")
        quantile = _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.4 / freedom
        return quantile * float(np.std(self.returns, ddof=1)) / float(np.sqrt(len(self.returns)))

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        return {"mean": self.mean, "std": self.std, "returns": list(self.returns), "lengths": list(self.lengths)}


def num_eval_envs(episodes: int) -> int:
    """How many environments play that many episodes side by side."""
    return min(episodes, _MAX_ENVS)


def make_eval_vec(experiment: Experiment, episodes: int, seed: int, *, here: bool = False) -> VecEnv:
    """A run's environments for an evaluation of so many episodes; their seeds are never those of training.

    External simulators run it in the slots that training leaves free. `here`: in this process, for policies that plan.
    """
    env, kwargs = experiment.environment()
    kwargs = kwargs | experiment.evaluation.env_kwargs
    count = num_eval_envs(episodes)
    if is_url(env):
        vec = external_vec_env(env, count, experiment.workers, Supervision(), "eval", kwargs, fewer=True)  # type: ignore[arg-type]
        vec.seed = seed
        return vec
    backend, workers = ("local", None) if here else (experiment.backend, experiment.workers)
    with _quiet_choice():
        return make_vec(env, count, backend, workers, seed, env_kwargs=kwargs, role="eval")


def acting_seed(seed: int, *, deterministic: bool) -> int:
    """Seed of what an evaluated policy draws."""
    return seeding.part_seed(seed, "eval", "acting", int(deterministic))


def evaluate(vec: VecEnv, policy: Policy, episodes: int, seed: int) -> Evaluation:
    """Let the policy play `episodes` whole games.

    Every environment plays its share of them, and no more: whoever took the first to finish would prefer short
    games. A game cut short by a fault is played again; one that goes on for 100,000 steps counts as it stands.
    """
    bind_envs(policy, vec)
    n = vec.num_envs
    quota = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    vec.reset(seed)
    batch = vec.recv()
    state = policy.initial_state(n)
    state = None if state is None else tree_map(np.array, to_numpy(state))
    running, steps = np.zeros(n), np.zeros(n, np.int64)
    returns: list[list[float]] = [[] for _ in range(n)]
    lengths: list[list[int]] = [[] for _ in range(n)]
    while quota.any():
        ids = batch.env_ids
        action, after, _ = policy.act(batch.obs, _rows(state, ids), batch.first)
        if state is not None:
            state = _with_rows(state, ids, to_numpy(after))
        vec.send(ids, action)
        batch = vec.recv()
        running[batch.env_ids] += batch.raw_reward
        steps[batch.env_ids] += 1
        for row in np.flatnonzero(batch.game_over | batch.faulty | (steps[batch.env_ids] >= _LONGEST)):
            env_id = batch.env_ids[row]
            if quota[env_id] and not batch.faulty[row]:
                quota[env_id] -= 1
                returns[env_id].append(float(running[env_id]))
                lengths[env_id].append(int(steps[env_id]))
            running[env_id] = steps[env_id] = 0
    result = Evaluation(tuple(chain.from_iterable(returns)), tuple(chain.from_iterable(lengths)))
    if max(result.lengths, default=0) >= _LONGEST:
        _log.warning("%s: episodes were cut after %s steps; give it a time limit", vec.spec.name, f"{_LONGEST:,}")
    return result


def _rows(state: Tree, ids: Any) -> Tree:
    return None if state is None else tree_map(lambda leaf: leaf[ids], state)


def _with_rows(state: Tree, ids: Any, rows: Tree) -> Tree:
    def put(old: Any, new: Any) -> Any:
        old[ids] = new
        return old

    return tree_map(put, state, rows)


@contextlib.contextmanager
def _quiet_choice() -> Iterator[None]:
    """The evaluation's backend is the training's; saying so again helps nobody."""
    logger = logging.getLogger("corral.envs")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


# How many of Connect Four's solved positions a run's agent plays right.


_GAME = "corral/Connect4-v0"


def share_solved(loaded: LoadedPolicy, sims: int | None = None) -> tuple[float, int]:
    """The share of right moves, and among how many; with so many simulations, by default those of its evaluations."""
    from corral.envs.suites.games.connect4 import CONNECT4
    from corral.envs.suites.games.connect4_positions import accuracy, known_positions
    from corral.planning.arena import SearchPlayer
    from corral.planning.planner import make_evaluation
    from corral.planning.search_policy import Search

    if loaded.experiment.env != _GAME:
        raise UserError(f"Solved positions are of {_GAME}, and this run is of {loaded.experiment.env}.")
    policy = loaded.as_policy() if sims is None else loaded.search_policy(sims)
    if not isinstance(policy, Search):
        raise UserError("Solved positions are played by search: say with how many simulations, --search-sims 100.")
    player = SearchPlayer(
        CONNECT4,
        lambda states, actions: make_evaluation(loaded, states, actions, 1, 1.0, np.random.default_rng(0)),
        policy.sims,
        policy.config,
    )
    return accuracy(player), len(known_positions()[0])
