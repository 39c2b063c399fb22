"""The contract of a topology: iterations of acting and learning, and a state to resume from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from corral.acting.episode_stats import EpisodeStats
from corral.acting.policy import ActContext, Policy, set_context, to_numpy
from corral.algos.base import Algorithm, ParamGroup
from corral.algos.registry import find_algorithm
from corral.config.experiment import Experiment
from corral.core import seeding
from corral.core.errors import UserError
from corral.core.types import EnvSpec, LossOutput, Sample, Trajectory
from corral.data.store import Store, make_store
from corral.envs.backends.simulators.options import connect_here, is_url, share_simulators
from corral.envs.make import make_vec
from corral.envs.normalize import NormalizedVecEnv
from corral.envs.vec_env import VecEnv
from corral.learn.device import choose, encoder_trial, find_device, lay_out, set_threads
from corral.learn.exchange.base import Exchange
from corral.learn.learner import Learner

# The parts that every topology is made of, from an experiment.


def make_algorithm(experiment: Experiment, spec: EnvSpec) -> Algorithm:
    """The experiment's algorithm, for environments that look like `spec`."""
    algo: Algorithm = find_algorithm(experiment.algo).load()(experiment.algorithm, spec, experiment.num_envs)
    return algo


def build_model(algo: Algorithm, seed: int, device: torch.device) -> torch.nn.Module:
    """The algorithm's network with weights drawn from the run's seed, whatever else draws random numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # LAPACK's rounding, and with it orthogonal weights, depends on the number of threads
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeding.part_seed(seed, "train", "network"))
            model = algo.build_model()
    finally:
        torch.set_num_threads(threads)
    model = model.to(device)
    lay_out(model)
    return model


def make_train_vec(
    experiment: Experiment, num_envs: int, seed: int, backend: str, workers: int | None, cores: int | None = None
) -> VecEnv:
    """Environments to learn from, which may keep this many cores busy."""
    env, kwargs = experiment.environment()
    if is_url(env):  # simulators run where they are, whatever the topology thinks of workers
        backend, workers = "auto", experiment.workers
        one_vec = experiment.topology in ("sync", "central_inference")
        kwargs = share_simulators(kwargs, 1 if one_vec else experiment.num_actors)
    vec = make_vec(env, num_envs, backend, workers, seed, env_kwargs=kwargs, cores=cores)
    if experiment.normalize_reward:
        replayed = make_algorithm(experiment, vec.spec).data.reuse == "replay"
        gamma = getattr(experiment.algorithm, "gamma", 0.99)
        return NormalizedVecEnv(vec, obs=False, gamma=gamma, scale_later=replayed)
    return vec


def choose_runtime(experiment: Experiment) -> str:
    """The runtime of a topology's roles: processes, but threads where simulators connect to one process of the run.

    All roles and the evaluation then share these simulators.
    """
    env, kwargs = experiment.environment()
    if not connect_here(env, kwargs):
        return "process" if experiment.runtime == "auto" else experiment.runtime
    if experiment.runtime in ("process", "ray"):
        raise UserError(
            f"Simulators that connect to {env} reach one process, and runtime={experiment.runtime} has several: leave "
            "runtime out, or start the simulators first with --bind and name their addresses."
        )
    return "inline"


Note = Callable[[str, str], None]
"""Takes the kind of an event, and what happened."""
OnRollout = Callable[[Trajectory], None]
"""Is given every trajectory that the learner receives, before it is stored."""
MakeExchange = Callable[[torch.nn.Module, Sequence[ParamGroup]], Exchange]
"""Makes the exchange of a learner from its network and its parameter groups."""


class Topology(ABC):
    """One experiment under way. The learner is here; who acts, and where, is the subclass's business."""

    spec: EnvSpec
    episodes: EpisodeStats
    """Finished episodes."""
    sees_rollouts = True
    """Whether trajectories come to this process."""

    def __init__(self, experiment: Experiment, note: Note, on_rollout: OnRollout = lambda trajectory: None):
        self.experiment, self._note, self._on_rollout = experiment, note, on_rollout
        self.device = find_device(experiment.device)
        self.env_steps = 0

    def _build_learner(
        self, spec: EnvSpec, others: int = 0, make_exchange: MakeExchange | None = None, precision: str = ""
    ) -> None:
        """Network, learner and store for environments that look like `spec`; `others` are threads of other parts."""
        experiment, seed = self.experiment, self.experiment.seed
        self.spec = spec
        self.algo = make_algorithm(experiment, spec)
        self.model = build_model(self.algo, seed, self.device)
        self.threads = set_threads(experiment.torch_threads, self.model, others)
        trial = encoder_trial(self.model, spec.observation, self.device)
        self.precision = choose(precision or experiment.precision, self.model, trial, self.device)
        order = torch.Generator().manual_seed(seeding.part_seed(seed, "train", "learning"))
        report = lambda text: self._note("not_finite", text)  # noqa: E731 - one line is clearer here
        exchange = None if make_exchange is None else make_exchange(self.model, self.algo.groups())
        self.learner = Learner(self.algo, self.model, order, self.precision, exchange, report)
        self.store = self._make_store()

    def _make_store(self) -> Store:
        seed = seeding.part_seed(self.experiment.seed, "train", "store")
        return make_store(self.spec, self.algo.data, self.experiment.num_envs, seed)

    @property
    def progress(self) -> float:
        """Share of the run's steps that are done."""
        return min(1.0, self.env_steps / self.experiment.steps)

    @property
    def learning_rate(self) -> float:
        """The current learning rate, of the first parameter group."""
        return next(iter(self.learner.learning_rates(self.progress).values()))

    def set_learning_rate(self, value: float) -> None:
        """Replace the algorithm's schedule by a constant; UserError where learners are in other processes."""
        self.learner.set_learning_rate(value)

    @abstractmethod
    def advance(self) -> dict[str, list[float]]:
        """One iteration; returns the metrics of its updates. It takes seconds at most, also when nothing happens."""

    def _learn(self, sample: Sample, metrics: dict[str, list[float]]) -> None:
        for output in self._step(sample):
            for name, value in output.metrics.items():
                metrics.setdefault(name, []).append(value)
            if output.priorities is not None and sample.keys is not None:
                self.store.feedback(sample.keys, to_numpy(output.priorities))

    def _step(self, sample: Sample) -> list[LossOutput]:
        return self.learner.step(sample, self.progress)

    def eval_policy(self, *, deterministic: bool, seed: int) -> Policy:
        """The policy as it is now, for evaluation; its randomness is its own."""
        policy = self.algo.eval_policy(self.model, deterministic=deterministic, rng=np.random.default_rng(seed))
        set_context(policy, ActContext(self.progress, self.learner.version, self.reward_scale))
        return policy

    @property
    def reward_scale(self) -> float | None:
        """What the rewards that are learned from are of the game's own; None where only the actors know."""
        return None if self.experiment.normalize_reward else 1.0

    def metrics(self) -> dict[str, float]:
        """Counters of the parts."""
        return {
            "learn/version": float(self.learner.version),
            "learn/skipped": float(self.learner.skipped),
            **self.learner.learning_rates(self.progress),
            **self.store.metrics(),
        }

    @property
    def thread_plan(self) -> str:
        """Threads of torch and BLAS, part by part."""
        return f"torch threads {self.threads}"

    def parts(self) -> list[dict[str, Any]]:
        """Name, process and health of the parts that live elsewhere, for `corral top`."""
        return []

    @abstractmethod
    def state_dict(self, *, replay: bool = True) -> dict[str, Any]:
        """Everything; without `replay`, a replay memory is left out and starts empty on resume."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Go on from what `state_dict` gave; returns the environments that could not be restored."""

    @abstractmethod
    def close(self) -> None:
        """End everything that belongs to it."""


def planning_metrics(steps: Iterable[int | None]) -> dict[str, float]:
    """What planning has cost all who act, in steps of simulators; nothing where nobody plans."""
    counted = [count for count in steps if count is not None]
    return {"search/simulator_steps": float(sum(counted))} if counted else {}


def make_topology(experiment: Experiment, note: Note, on_rollout: OnRollout = lambda trajectory: None) -> Topology:
    """The topology that an experiment asks for, ready to advance."""
    if experiment.topology == "sync":
        from corral.topologies.sync import Sync

        return Sync(experiment, note, on_rollout=on_rollout)
    if experiment.topology == "data_parallel":
        from corral.topologies.data_parallel import DataParallel

        return DataParallel(experiment, note)
    from corral.topologies.actor_learner import ActorLearner

    return ActorLearner(experiment, note, on_rollout)
