"""The contract of a topology: iterations of acting and learning, and a state to resume from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from corral.acting.episode_stats import EpisodeStats
from corral.acting.policy import ActContext, Policy, set_context, to_numpy
from corral.algos.base import Algorithm, ParamGroup
from corral.algos.registry import find_algorithm
from corral.config.experiment import Experiment
from corral.core import seeding
from corral.core.encoding import Value
from corral.core.errors import UserError
from corral.core.types import Array, EnvSpec, LossOutput, Sample, Trajectory
from corral.data.make import make_store
from corral.data.store import Store
from corral.envs.backends.simulators.options import connect_here, is_url, share_simulators
from corral.envs.make import make_vec
from corral.envs.normalize import NormalizedVecEnv
from corral.envs.vec_env import VecEnv
from corral.learn.device import choose, find_device, use_channels_last
from corral.learn.exchange.base import Exchange
from corral.learn.learner import Learner
from corral.learn.threads import choose_threads, set_threads
from corral.learn.weights import to_tensors
from corral.nets.network import has_image_encoder
from corral.runtimes.base import MakeRole

_MAX_VALUES = 1 << 16
_BUILD_S = 180.0


def make_algorithm(experiment: Experiment, spec: EnvSpec) -> Algorithm:
    """The experiment's algorithm, for environments with this `spec`."""
    _require_countable(spec)
    entry = find_algorithm(experiment.algo, experiment.algo_class)
    algo: Algorithm = entry.load()(experiment.algorithm, spec, experiment.num_envs)
    return algo


def _require_countable(spec: EnvSpec) -> None:
    """UserError if a network would need an input or output for each of very many values."""
    for what, layout in (("observation", spec.observation), ("action", spec.action)):
        for leaf in layout.leaves:
            values = int(np.sum(getattr(leaf.space, "nvec", getattr(leaf.space, "n", 0))))
            if values > _MAX_VALUES and leaf.is_discrete:
                raise UserError(
                    f"{spec.name} has {values:,} values in its {what} space {leaf.space}, and a network has one "
                    f"{'input' if what == 'observation' else 'output'} for each, at most {_MAX_VALUES:,}: split it "
                    "into several small numbers (MultiDiscrete), or use a Box."
                )


def build_model(algo: Algorithm, seed: int, device: str = "cpu", rank: int = 0) -> torch.nn.Module:
    """The algorithm's network with weights drawn from the run's seed, independent of other random numbers.

    `device` and `rank` are those of `find_device`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the rounding of LAPACK, and so of orthogonal weights, depends on the number of threads
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeding.component_seed(seed, "train", "network"))
            model = algo.build_model()
    finally:
        torch.set_num_threads(threads)
    model = model.to(find_device(device, model, rank))
    use_channels_last(model)
    return model


def load_learner(learner: Learner, state: Value) -> None:
    """Load the state of another learner, except its RNG and the observations that it will add to the statistics."""
    own = learner.state_dict()
    learner.load_state_dict({**to_tensors(state), "rng": own["rng"], "new_moments": own["new_moments"]})


def start_limit_s(experiment: Experiment) -> float:
    """Seconds for an actor to start: one environment to measure, those that it steps in turn, and the network."""
    return _BUILD_S + experiment.supervision.start_timeout_s * (1 + experiment.envs_per_actor)


def role_factory(role: Callable[..., Any], *args: Any) -> Callable[[int], MakeRole]:
    """For a `SupervisedRole`: each start makes `role(*args, start, mailbox)`, where `start` counts from 0."""
    return lambda start: partial(role, *args, start)


def make_train_vec(
    experiment: Experiment, num_envs: int, seed: int, backend: str, workers: int | None, cores: int | None = None
) -> VecEnv:
    """Training environments, which may keep `cores` cores busy."""
    env, kwargs = experiment.environment()
    if is_url(env):  # simulators run elsewhere, whatever workers the topology has
        backend, workers = "auto", experiment.workers
        one_vec = experiment.topology in ("sync", "central_inference")
        kwargs = share_simulators(kwargs, 1 if one_vec else experiment.num_actors)
    vec = make_vec(
        env, num_envs, backend, workers, seed, env_kwargs=kwargs, supervision=experiment.supervision, cores=cores,
        worker_cpus=experiment.worker_cpus,
    )  # fmt: skip
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
            f"Simulators that connect to {env} can reach only one process, and runtime={experiment.runtime} has "
            "several: omit runtime, or start the simulators first with --bind and give their addresses."
        )
    return "inline"


Note = Callable[[str, str], None]
"""Called with the kind of an event and its description."""
OnRollout = Callable[[Trajectory], None]
"""Called with every trajectory that the learner receives, before it is stored."""
MakeExchange = Callable[[torch.nn.Module, Sequence[ParamGroup]], Exchange]
"""Makes the exchange of a learner from its network and its parameter groups."""


@dataclass(frozen=True)
class PolicySnapshot:
    """A copy of the policy after `step` environment steps, from which `LoadedPolicy` makes it elsewhere."""

    step: int
    weights: dict[str, torch.Tensor]
    meta: dict[str, Any]

    def arrays(self) -> dict[str, Array]:
        return {name: tensor.numpy() for name, tensor in self.weights.items()}


class StoppedWaiting(KeyboardInterrupt):
    """A signal ended `advance` while it waited for environments: the learner's state is that before the call."""


class Topology(ABC):
    """A running experiment. The learner is in this process; subclasses define where acting happens."""

    spec: EnvSpec
    episodes: EpisodeStats
    threads: int
    """Number of torch threads of this process."""
    thread_plan: str
    """The threads of all processes, for the header."""
    shows_masks = False
    """Whether environments have shown masks of their legal actions."""
    sees_rollouts = True
    """Whether trajectories reach this process."""
    saves_without_envs = True
    """Whether `state_dict(envs=False)` works while environments do not answer."""
    awaits_envs = False
    """Whether this thread waits for environments, which may take as long as their deadlines."""

    def __init__(self, experiment: Experiment, note: Note, on_rollout: OnRollout = lambda trajectory: None):
        self.experiment, self._note, self._on_rollout = experiment, note, on_rollout
        if experiment.device != "auto":  # an error now, and not after the environments were built
            find_device(experiment.device)
        self.env_steps = 0

    def _build_learner(
        self, spec: EnvSpec, others: int = 0, make_exchange: MakeExchange | None = None, precision: str = "",
        rank: int = 0,
    ) -> None:  # fmt: skip
        """Build network, learner and store for this `spec`; `others` is the number of threads of other processes."""
        experiment, seed = self.experiment, self.experiment.seed
        self.spec = spec
        self.algo = make_algorithm(experiment, spec)
        if spec.needs_masks and not self.algo.uses_action_masks:
            raise UserError(
                f"{spec.name} refuses actions that its action mask excludes, and {experiment.algo} ignores masks: use "
                "alphazero."
            )
        self.model = build_model(self.algo, seed, experiment.device, rank)
        chosen = choose_threads(experiment.torch_threads, self.model, others)
        self.threads, self.thread_plan = chosen.number, f"torch threads {chosen}"
        set_threads(self.threads)
        self.precision = choose(precision or experiment.precision, self.model, spec.observation)
        if has_image_encoder(self.model):  # measured again, it could be the other one
            self.experiment = replace(self.experiment, precision=self.precision.name)  # type: ignore[arg-type]
        order = torch.Generator().manual_seed(seeding.component_seed(seed, "train", "learning"))
        exchange = None if make_exchange is None else make_exchange(self.model, self.algo.groups())
        report = partial(self._note, "not_finite")
        self.learner = Learner(self.algo, self.model, order, self.precision, exchange, report)
        self.store = self._make_store()

    def _make_store(self) -> Store:
        seed = seeding.component_seed(self.experiment.seed, "train", "store")
        return make_store(self.spec, self.algo.data, self.experiment.num_envs, seed)

    @property
    def progress(self) -> float:
        """Fraction of the run's steps that are done."""
        return min(1.0, self.env_steps / self.experiment.steps)

    @property
    def learning_rate(self) -> float:
        """The current rate of the first parameter group."""
        return next(iter(self.learner.learning_rates(self.progress).values()))

    def set_learning_rate(self, value: float | None, group: str | None = None) -> None:
        """`Learner.set_learning_rate`; UserError where learners are in other processes."""
        self.learner.set_learning_rate(value, group)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Start from the weights and statistics of another network; before the first `advance`."""
        self.learner.load_weights(weights)

    @abstractmethod
    def advance(self) -> dict[str, list[float]]:
        """One iteration; returns the metrics of its updates. Returns within seconds even without new data."""

    def _learn(self, sample: Sample, metrics: dict[str, list[float]]) -> None:
        for output in self._step(sample):
            for name, value in output.metrics.items():
                metrics.setdefault(name, []).append(value)
            if output.priorities is not None and sample.keys is not None:
                self.store.feedback(sample.keys, to_numpy(output.priorities))

    def _step(self, sample: Sample) -> list[LossOutput]:
        return self.learner.step(sample, self.progress, self.reward_scale or 1.0)

    def eval_policy(self, *, deterministic: bool, seed: int) -> Policy:
        policy = self.algo.eval_policy(self.model, deterministic=deterministic, rng=np.random.default_rng(seed))
        set_context(policy, ActContext(self.progress, self.learner.version, self.reward_scale))
        return policy

    @property
    def policy_meta(self) -> dict[str, Any]:
        """What a checkpoint says about its policy, besides the weights."""
        return {
            "spec": self.spec.to_json(),
            "precision": self.precision.name,
            "version": self.learner.version,
            "reward_scale": self.reward_scale,
            "evaluation": None,
        }

    def snapshot(self) -> PolicySnapshot:
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        return PolicySnapshot(self.env_steps, weights, self.policy_meta | {"step": self.env_steps})

    @property
    def reward_scale(self) -> float | None:
        """Scale of the rewards used for learning relative to the unscaled ones; None where only the actors know it."""
        return None if self.experiment.normalize_reward else 1.0

    def metrics(self) -> dict[str, float]:
        return {
            "learn/version": float(self.learner.version),
            "learn/skipped": float(self.learner.skipped),
            **self.learner.learning_rates(self.progress),
            **self.store.metrics(),
        }

    def processes(self) -> list[dict[str, Any]]:
        """Name, process and health of the other processes, for `corral top`."""
        return []

    @abstractmethod
    def state_dict(self, *, replay: bool = True, envs: bool = True) -> dict[str, Any]:
        """The complete state. Without `replay`, the replay buffer is omitted and starts empty on resume; without
        `envs`, environments that do not answer are not asked, and all start new episodes.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Resume from `state_dict`; returns the environments that could not be restored."""

    @abstractmethod
    def close(self) -> None: ...


def planning_metrics(steps: Iterable[int | None]) -> dict[str, float]:
    """Simulator steps used for planning; empty if no policy plans."""
    counted = [count for count in steps if count is not None]
    return {"search/simulator_steps": float(sum(counted))} if counted else {}


def make_topology(experiment: Experiment, note: Note, on_rollout: OnRollout = lambda trajectory: None) -> Topology:
    """The experiment's topology, ready to advance."""
    if experiment.topology == "sync":
        from corral.topologies.sync import Sync

        return Sync(experiment, note, on_rollout=on_rollout)
    if experiment.topology == "data_parallel":
        from corral.topologies.data_parallel import DataParallel

        return DataParallel(experiment, note)
    from corral.topologies.actor_learner import ActorLearner

    return ActorLearner(experiment, note, on_rollout)
