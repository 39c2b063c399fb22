"""Acting and learning in turns, in one process: the policy acts with the learner's own network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from corral import seeding
from corral.acting.policy import Policy, to_numpy
from corral.acting.sampler import Sampler
from corral.algos.contract import Algorithm
from corral.algos.registry import find_algorithm
from corral.data.store import make_store
from corral.envs.contract import VecEnv
from corral.envs.make import make_vec
from corral.envs.normalize import NormalizedVecEnv
from corral.experiment import Experiment
from corral.learn.learner import Learner
from corral.learn.precision import choose, encoder_trial, find_device, lay_out
from corral.learn.threads import set_threads
from corral.types import EnvSpec, Sample


class Sync:
    """One experiment in the `sync` topology. `advance` is one turn; everything that it goes on from is in `state_dict`.

    On one machine a run is then the same however often it was stopped and resumed.
    """

    def __init__(self, experiment: Experiment, note: Callable[[str, str], None]):
        self.experiment = experiment
        self.device = find_device(experiment.device)
        self.vec = _make_vec(experiment)
        try:
            self._build(note)
        except BaseException:
            self.vec.close()
            raise

    def _build(self, note: Callable[[str, str], None]) -> None:
        experiment, seed = self.experiment, self.experiment.seed
        self.algo = make_algorithm(experiment, self.vec.spec)
        self.model = build_model(self.algo, seed, self.device)
        self.threads = set_threads(experiment.threads, self.model)
        trial = encoder_trial(self.model, self.vec.spec.observation, self.device)
        self.precision = choose(experiment.precision, self.model, trial, self.device)
        self._rng = np.random.default_rng(seeding.part_seed(seed, "train", "acting"))
        order = torch.Generator().manual_seed(seeding.part_seed(seed, "train", "learning"))
        self.learner = Learner(
            self.algo, self.model, order, self.precision, report=lambda text: note("not_finite", text)
        )
        self.policy = self.algo.make_policy(self.model, explore=True, rng=self._rng)
        self.sampler = Sampler(self.vec, self.policy)
        store_seed = seeding.part_seed(seed, "train", "store")
        self.store = make_store(self.vec.spec, self.algo.data, experiment.num_envs, store_seed)
        self.env_steps = 0
        self._rollouts: Iterator[Any] | None = None

    @property
    def progress(self) -> float:
        """Share of the run's steps that are done."""
        return min(1.0, self.env_steps / self.experiment.steps)

    def advance(self) -> dict[str, list[float]]:
        """Act for a fragment, then learn while the store gives batches; returns what the losses said."""
        if self._rollouts is None:
            self._rollouts = self.sampler.rollouts(self.algo.fragment_steps(self.experiment.num_envs))
        self.policy.progress = self.progress
        self.sampler.version = self.learner.version
        traj = next(self._rollouts)
        self.env_steps += int(traj.faulty.size - traj.faulty.sum())
        self.store.progress = self.progress
        self.store.put(traj)
        said: dict[str, list[float]] = {}
        while self.store.ready():
            self._learn(self.store.get(), said)
        return said

    def _learn(self, sample: Sample, said: dict[str, list[float]]) -> None:
        for output in self.learner.step(sample, self.progress):
            for name, value in output.metrics.items():
                said.setdefault(name, []).append(value)
            if output.priorities is not None and sample.keys is not None:
                self.store.feedback(sample.keys, to_numpy(output.priorities))

    def eval_policy(self, *, deterministic: bool, seed: int) -> Policy:
        """The policy as it is now, for evaluation; its randomness is its own."""
        policy = self.algo.make_policy(self.model, explore=not deterministic, rng=np.random.default_rng(seed))
        policy.progress = self.progress
        return policy

    def metrics(self) -> dict[str, float]:
        """Counters of the parts."""
        return {
            "learn/version": float(self.learner.version),
            "learn/skipped": float(self.learner.skipped),
            "learn/lr": self.algo.learning_rate(self.progress),
            "env/restarts": float(self.vec.restarts),
            **self.store.metrics(),
        }

    def state_dict(self, *, replay: bool = True) -> dict[str, Any]:
        """Everything; without `replay`, the store is left out and starts empty on resume."""
        return {
            "env_steps": self.env_steps,
            "learner": self.learner.state_dict(),
            "acting_rng": self._rng.bit_generator.state,
            "sampler": self.sampler.state_dict(),
            "store": self.store.state_dict() if replay or self.algo.data.reuse == "once" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Go on from what `state_dict` gave; returns the environments that could not be restored."""
        self.env_steps = state["env_steps"]
        self.learner.load_state_dict(state["learner"])
        self._rng.bit_generator.state = state["acting_rng"]
        if state["store"] is not None:
            self.store.load_state_dict(state["store"])
        return self.sampler.load_state_dict(state["sampler"])

    def close(self) -> None:
        """Close the environments."""
        if self._rollouts is not None:
            with contextlib.suppress(ValueError):
                self._rollouts.close()  # type: ignore[attr-defined]
        self.vec.close()


def make_algorithm(experiment: Experiment, spec: EnvSpec) -> Algorithm:
    """The experiment's algorithm, for environments that look like `spec`."""
    algo: Algorithm = find_algorithm(experiment.algo).load()(experiment.algorithm, spec, experiment.num_envs)
    return algo


def build_model(algo: Algorithm, seed: int, device: torch.device) -> torch.nn.Module:
    """The algorithm's network with weights drawn from the run's seed, whatever else draws random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.part_seed(seed, "train", "network"))
        model = algo.build_model()
    model = model.to(device)
    lay_out(model)
    return model


def _make_vec(experiment: Experiment) -> VecEnv:
    env, kwargs = experiment.environment()
    vec = make_vec(env, experiment.num_envs, experiment.backend, experiment.workers, experiment.seed, env_kwargs=kwargs)
    vec.record_episodes()
    if experiment.normalize_reward:
        gamma = getattr(experiment.algorithm, "gamma", 0.99)
        return NormalizedVecEnv(vec, obs=False, gamma=gamma)
    return vec
