"""Acting and learning in turns, in one process: the policy acts with the learner's own network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from corral.acting.policy import ActContext, simulator_steps
from corral.acting.sampler import Sampler
from corral.config.experiment import Experiment
from corral.core import seeding
from corral.data.store import StoreContext
from corral.envs.normalize import NormalizedVecEnv
from corral.learn.device import has_convolutions
from corral.topologies.base import (
    MakeExchange,
    Note,
    OnRollout,
    StoppedWaiting,
    Topology,
    make_train_vec,
    planning_metrics,
)


class Sync(Topology):
    """The `sync` topology. On one machine, a run that was stopped and resumed equals one that was not."""

    def __init__(
        self,
        experiment: Experiment,
        note: Note,
        make_exchange: MakeExchange | None = None,
        cores: int | None = None,
        on_rollout: OnRollout = lambda trajectory: None,
        rank: int = 0,
    ):
        super().__init__(experiment, note, on_rollout)
        self.vec = make_train_vec(
            experiment, experiment.num_envs, experiment.seed, experiment.backend, experiment.workers, cores
        )
        self._shared_progress: tuple[int, int] | None = None
        self._rows = 0  # steps since `set_shared_progress`
        self.vec.record_episodes()
        if self.vec.resolved_backend is not None:  # `auto` might choose another next time, which changes random numbers
            chosen: dict[str, Any] = dict(zip(("backend", "workers"), self.vec.resolved_backend, strict=True))
            self.experiment = replace(experiment, **chosen)
        try:
            self._build_learner(self.vec.spec, make_exchange=make_exchange, rank=rank)
            if has_convolutions(self.model):  # the last bits depend on it, and another time other cores are free
                self.experiment = replace(self.experiment, torch_threads=self.threads)
            self._rng = np.random.default_rng(seeding.component_seed(experiment.seed, "train", "acting"))
            self.policy = self.algo.make_policy(self.model, explore=True, rng=self._rng)
            self.sampler = Sampler(self.vec, self.policy)
            self.episodes = self.sampler.episodes
        except BaseException:
            self.vec.close()
            raise
        self._rollouts: Iterator[Any] | None = None

    def set_shared_progress(self, base: int, num_workers: int) -> None:
        """Count progress as one of `num_workers` workers that have made `base` steps in total."""
        self._shared_progress, self._rows = (base, num_workers), 0

    @property
    def progress(self) -> float:
        """Fraction of the run's steps that are done.

        A worker assumes that all have made as many steps as itself, faulty ones included: all then have the same
        learning rate.
        """
        if self._shared_progress is None:
            return super().progress
        base, num_workers = self._shared_progress
        return min(1.0, (base + num_workers * self._rows) / self.experiment.steps)

    @property
    def reward_scale(self) -> float | None:
        return self.vec.learning_scale

    def advance(self) -> dict[str, list[float]]:
        steps, envs = self.algo.fragment_steps(self.experiment.num_envs), self.experiment.num_envs
        if self._rollouts is None:
            self._rollouts = self.sampler.rollouts(steps)
        self.sampler.set_context(ActContext(self.progress, self.learner.version, self.reward_scale))
        # A worker whose store is full does not sample until the others also have data for the shared update.
        self.awaits_envs = True
        try:
            traj = next(self._rollouts) if self._shared_progress is None or self.store.room() else None
        except KeyboardInterrupt as stop:
            raise StoppedWaiting from stop
        finally:
            self.awaits_envs = False
            for text in self.vec.new_faults():
                self._note("fault", text)
        self._rows += steps * envs
        self.shows_masks = self.vec.shows_masks
        if traj is not None:
            self.env_steps += int(traj.faulty.size - traj.faulty.sum())
            self._on_rollout(traj)
            self.learner.observe(traj)
            self.store.put(traj, ctx=StoreContext(self.progress, self.vec.reward_scale))
        metrics: dict[str, list[float]] = {}
        while self._ready():
            self._learn(self.store.get(), metrics)
        return metrics

    def _ready(self) -> bool:
        """Whether there is data for an update. Batches of one fragment are ready in all workers at the same time."""
        data, ready = self.algo.data, self.store.ready()
        alike = data.unit == "sequence" and data.reuse == "once" and data.batch_size == self.experiment.num_envs
        return ready if alike else self.learner.agree(ready)

    def metrics(self) -> dict[str, float]:
        found = {**super().metrics(), "env/restarts": float(self.vec.restarts)}
        return found | planning_metrics([simulator_steps(self.policy)])

    def state_dict(self, *, replay: bool = True, envs: bool = True) -> dict[str, Any]:
        scales = self.vec.statistics.state_dict() if isinstance(self.vec, NormalizedVecEnv) else None
        without = {"sampler": None, "episodes": self.episodes.state_dict(), "scales": scales}
        return {
            "env_steps": self.env_steps,
            "learner": self.learner.state_dict(),
            "acting_rng": self._rng.bit_generator.state,
            **({"sampler": self.sampler.state_dict()} if envs else without),
            "store": self.store.state_dict() if replay or self.algo.data.reuse == "once" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        self.env_steps = state["env_steps"]
        self.learner.load_state_dict(state["learner"])
        self._rng.bit_generator.state = state["acting_rng"]
        if state["store"] is not None:
            self.store.load_state_dict(state["store"])
        if state["sampler"] is None:
            return self._restart(state)
        if self.experiment.factory is not None:  # given again, perhaps under another name; its spaces were compared
            rows = state["sampler"]["vec"]
            rows.get("vec", rows)["identity"]["env"] = self.vec.spec.name  # NormalizedVecEnv keeps its inner state so
        return self.sampler.load_state_dict(state["sampler"])

    def _restart(self, state: dict[str, Any]) -> list[int]:
        """New episodes everywhere, with seeds that the run has not used."""
        self.episodes.load_state_dict(state["episodes"])
        if isinstance(self.vec, NormalizedVecEnv):
            self.vec.statistics.load_state_dict(state["scales"])
        self.vec.reset(seeding.component_seed(self.experiment.seed, "train", "restart", self.env_steps))
        return list(range(self.vec.num_envs))

    def close(self) -> None:
        if self._rollouts is not None:
            with contextlib.suppress(ValueError):
                self._rollouts.close()  # type: ignore[attr-defined]
        self.vec.close()
