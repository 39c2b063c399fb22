"""Evaluation in whole episodes with seeds that training does not use; `corral.evaluate` evaluates a saved run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.acting.policy import PlanningPolicy, Policy, bind_envs, to_numpy
from corral.config.environment import describe_env
from corral.core import seeding
from corral.core.errors import UserError
from corral.core.log import log_level
from corral.core.types import tree_map
from corral.envs.backends.simulators.options import external_vec_env, is_url
from corral.envs.make import make_vec
from corral.envs.resolve import EnvLike
from corral.envs.suites.games.board_env import game_of
from corral.envs.vec_env import VecEnv
from corral.runs.folder import require_same_env
from corral.runs.load import LoadedPolicy, load_policy

if TYPE_CHECKING:
    from corral.config.experiment import Experiment

_MAX_ENVS = 16
_MAX_STEPS = 100_000
"""Steps after which an episode is counted as it is, so that an endless one does not block a run."""
# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
      2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip

OnStep = Callable[[int, int], None]
"""Called after every step of an evaluation with the number of finished episodes and of steps of all environments."""
_log = logging.getLogger("corral.runs")


@dataclass(frozen=True)
class Evaluation:
    """Unclipped returns and lengths of whole episodes."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
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
        return {"mean": self.mean, "std": self.std, "returns": list(self.returns), "lengths": list(self.lengths)}


def evaluate(
    run: str | Path,
    episodes: int = 20,
    env: EnvLike | None = None,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    deterministic: bool = True,
    seed: int | None = None,
    checkpoint: str = "best",
    search_sims: int | None = None,
) -> Evaluation:
    """Evaluate the policy of a run.

    Args:
        run: the run's folder.
        episodes: number of episodes.
        env: an environment other than the run's, with the same spaces.
        env_kwargs: keyword arguments of the environment that differ from the run's.
        deterministic: take the best actions instead of sampling.
        seed: of the episodes; default: one that the run did not use. The best checkpoint was selected by the run's own
            evaluations, so their score is optimistic; the run's seed repeats them.
        checkpoint: `best`, `latest`, or a name.
        search_sims: plan with this many simulations before every action.
    """
    if episodes < 1:
        raise UserError(f"episodes must be at least 1, got {episodes}.")
    loaded = load_policy(run, checkpoint, device="run")
    if env_kwargs:
        loaded.experiment, env = with_env(loaded.experiment, env, env_kwargs), None
    from corral.learn.threads import own_threads  # torch, as everything that evaluates needs

    with own_threads():
        loaded.use_training_threads()
        return evaluate_loaded(loaded, episodes, [deterministic], env=env, seed=seed, search_sims=search_sims)[0]


def evaluate_loaded(
    loaded: LoadedPolicy,
    episodes: int,
    kinds: Sequence[bool],
    *,
    env: EnvLike | None = None,
    vec: VecEnv | None = None,
    seed: int | None = None,
    search_sims: int | None = None,
    on_step: OnStep | None = None,
) -> list[Evaluation]:
    """One evaluation per entry of `kinds` (True: deterministic actions); in `vec` if given."""
    experiment = loaded.experiment
    seed = report_seed(experiment.seed) if seed is None else seed
    plans = search_sims is not None or isinstance(loaded.as_policy(), PlanningPolicy)
    make = loaded.as_policy if search_sims is None else partial(loaded.search_policy, search_sims)
    # A given one stays open.
    opened = contextlib.nullcontext(vec) if vec else make_eval_vec(experiment, episodes, seed, env=env, here=plans)
    with opened as envs:
        require_same_env(envs.spec, loaded.spec)
        return [play(envs, make, kind, experiment, episodes, seed, env, on_step) for kind in kinds]


def play(
    vec: VecEnv, make_policy: Callable[..., Policy], deterministic: bool, experiment: Experiment, episodes: int,
    seed: int, env: EnvLike | None = None, on_step: OnStep | None = None,
) -> Evaluation:  # fmt: skip
    """Evaluate a policy; in games of simulators with an opponent, which Corral's own games move themselves."""
    policy = make_policy(deterministic=deterministic, seed=acting_seed(seed, deterministic=deterministic))
    opponent = link_opponent(experiment, env)
    if opponent is not None:
        from corral.planning.versus import Versus  # compiles code, so imported only when needed

        policy = Versus(policy, opponent, seed)
    return evaluate_policy(vec, policy, episodes, seed, on_step)


def num_eval_envs(episodes: int) -> int:
    """Number of parallel environments for this many episodes."""
    return min(episodes, _MAX_ENVS)


def make_eval_vec(
    experiment: Experiment, episodes: int, seed: int, *, env: EnvLike | None = None, here: bool = False
) -> VecEnv:
    """Environments with evaluation seeds, in free slots of external simulators; `here`: in this process, to plan."""
    what, kwargs = _environment(experiment, env)
    count, limits = num_eval_envs(episodes), experiment.supervision
    if is_url(what):
        if (opponent := kwargs.pop("opponent", None)) is not None:  # see `play`
            from corral.planning.versus import read_opponent

            read_opponent(opponent)  # refused before training, not after
        vec = external_vec_env(what, count, experiment.workers, limits, "eval", kwargs, fewer=True)  # type: ignore[arg-type]
        vec.seed = seed
        return vec
    backend, workers = ("local", None) if here else (experiment.backend, experiment.workers)
    with log_level("corral.envs", logging.WARNING):  # without the message about the choice of backend
        return make_vec(what, count, backend, workers, seed, env_kwargs=kwargs, supervision=limits, role="eval")


def _environment(experiment: Experiment, env: EnvLike | None) -> tuple[EnvLike, dict[str, Any]]:
    if env is None:
        own, kwargs = experiment.environment()
        return own, kwargs | experiment.eval_env_kwargs
    if isinstance(env, str):  # an Atari id gets the same preprocessing as in training
        return with_env(experiment, env).environment()
    return env, {}


def with_env(experiment: Experiment, env: EnvLike | None, env_kwargs: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment with another environment, whose simulators keep the token, or with other arguments of its own."""
    given = dict(env_kwargs or {})
    if env is None:
        # Those of evaluations would come last and win.
        rest = {name: value for name, value in experiment.eval_env_kwargs.items() if name not in given}
        return replace(experiment, env_kwargs=experiment.env_kwargs | given, eval_env_kwargs=rest)
    text, kwargs, factory = describe_env(env)
    token = {k: v for k, v in experiment.env_kwargs.items() if k == "token_file" and is_url(text)}
    return replace(
        experiment, env=text, env_kwargs=token | kwargs | given, eval_env_kwargs={}, factory=factory, untrusted=""
    )


def link_opponent(experiment: Experiment, env: EnvLike | None = None) -> str | None:
    """The opponent that Corral moves in a game of external simulators."""
    return experiment.eval_env_kwargs.get("opponent") if env is None and is_url(experiment.env) else None


def report_seed(seed: int) -> int:
    """Seed of episodes that neither trained a run with this seed nor selected its best checkpoint."""
    return seeding.component_seed(seed, "eval", "report")


def acting_seed(seed: int, *, deterministic: bool) -> int:
    """Seed of the random numbers of an evaluated policy."""
    return seeding.component_seed(seed, "eval", "acting", int(deterministic))


def evaluate_policy(vec: VecEnv, policy: Policy, episodes: int, seed: int, on_step: OnStep | None = None) -> Evaluation:
    """Play `episodes` whole episodes.

    Every environment plays a fixed share: counting the first to finish would favour short episodes. An episode cut by a
    fault is repeated, and so is one that had begun before; one of 100,000 steps is counted as it is.
    """
    bind_envs(policy, vec)
    n = vec.num_envs
    quota = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    vec.reset(seed)
    batch = vec.recv()
    begun = np.zeros(n, np.bool_) if vec.continued is None else vec.continued.copy()
    state = policy.initial_state(n)
    state = None if state is None else tree_map(np.array, to_numpy(state))
    running, steps, own = np.zeros(n), np.zeros(n, np.int64), np.ones(n, np.bool_)
    returns: list[list[float]] = [[] for _ in range(n)]
    lengths: list[list[int]] = [[] for _ in range(n)]
    total = 0
    while quota.any():
        ids = batch.env_ids
        held = None if state is None else tree_map(itemgetter(ids), state)
        action, after, extras = policy.act(batch.obs, held, batch.first)
        own[ids] = extras.get("agent", True)
        if state is not None:
            tree_map(lambda whole, rows, ids=ids: whole.__setitem__(ids, rows), state, to_numpy(after))
        vec.send(ids, action)
        batch = vec.recv()
        moved = own[batch.env_ids]
        running[batch.env_ids] += np.where(moved, batch.raw_reward, -batch.raw_reward)  # the opponent's win is a loss
        steps[batch.env_ids] += moved
        for row in np.flatnonzero(batch.game_over | batch.faulty | (steps[batch.env_ids] >= _MAX_STEPS)):
            env_id = batch.env_ids[row]
            if quota[env_id] and not batch.faulty[row] and not begun[env_id]:
                quota[env_id] -= 1
                returns[env_id].append(float(running[env_id]))
                lengths[env_id].append(int(steps[env_id]))
            running[env_id] = steps[env_id] = begun[env_id] = 0
        total += len(ids)
        if on_step is not None:
            on_step(episodes - int(quota.sum()), total)
    result = Evaluation(tuple(chain.from_iterable(returns)), tuple(chain.from_iterable(lengths)))
    if max(result.lengths, default=0) >= _MAX_STEPS:
        _log.warning("%s: episodes were truncated after %s steps; add a time limit", vec.spec.name, f"{_MAX_STEPS:,}")
    return result


def solved_fraction(loaded: LoadedPolicy, sims: int | None = None) -> tuple[float, int]:
    """Fraction of correct moves in the game's solved positions, and their number; default: the run's sims."""
    from corral.planning.planner import make_evaluation
    from corral.planning.search_player import SearchPlayer
    from corral.planning.search_policy import Search

    experiment = loaded.experiment
    with make_eval_vec(experiment, 1, experiment.seed, here=True) as vec:
        game = game_of(vec)
    if game is None or game.accuracy is None:
        raise UserError(f"{experiment.env} has no solved positions: choose another --opponent.")
    policy = loaded.as_policy() if sims is None else loaded.search_policy(sims)
    if not isinstance(policy, Search):
        raise UserError("Solved positions need a search: set its simulations, such as --search-sims 100.")
    player = SearchPlayer(
        game,
        lambda states, actions: make_evaluation(loaded, states, actions, 1, 1.0, np.random.default_rng(0)),
        policy.sims,
        policy.config,
    )
    return game.accuracy(player)
