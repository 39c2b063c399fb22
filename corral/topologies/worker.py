"""The role that acts and learns like the topology `sync`, and exchanges gradients or weights with other workers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from corral.acting.policy import simulator_steps
from corral.algos.base import ParamGroup
from corral.config.experiment import ActorLearnerConfig, Experiment
from corral.core import seeding
from corral.core.encoding import Value
from corral.envs.normalize import NormalizedVecEnv, RunningMoments
from corral.learn.exchange.base import ExchangeSetup, GroupExchange, PeerLost, make_exchange
from corral.learn.exchange.config import DataParallelConfig
from corral.learn.exchange.peers import own_address
from corral.learn.weights import to_arrays
from corral.runtimes.base import Mailbox
from corral.topologies.base import load_learner
from corral.topologies.sync import Sync


class Worker:
    """One of several workers. The first draws the same random numbers as `sync`; other starts have their own seeds."""

    def __init__(self, experiment: Experiment, host: str, secret: bytes, index: int, start: int, mailbox: Mailbox):
        seed = experiment.seed
        if index or start:
            seed = seeding.component_seed(seed, "train", "actor", index, start)
        self._config, self._seed, self._secret = experiment.data_parallel, seed, secret
        self._address = own_address(host)
        self._index, self._first_id = index, index * experiment.envs_per_actor
        self._experiment = replace(
            experiment, topology="sync", runtime="auto", actors=None, actor_learner=ActorLearnerConfig(),
            data_parallel=DataParallelConfig(),
            num_envs=experiment.envs_per_actor, seed=seed, torch_threads=experiment.torch_threads or 1,
        )  # fmt: skip
        self._notes: list[list[str]] = []

    def build(self, precision: str) -> Value:
        self._exchange: GroupExchange

        def exchange(model: nn.Module, groups: Sequence[ParamGroup]) -> GroupExchange:
            seed = self._seed % 2**32
            self._exchange = make_exchange(
                ExchangeSetup(self._config, model, groups, self._address, self._secret, seed)
            )
            return self._exchange

        experiment = replace(self._experiment, precision=precision)  # type: ignore[arg-type]
        note = lambda kind, text: self._notes.append([kind, text])  # noqa: E731
        self._sync = Sync(experiment, note, exchange, cores=1, rank=self._index)
        return {
            "spec": self._sync.spec.to_json(),
            "precision": self._sync.precision.name,
            "address": [self._address, self._exchange.port],
        }

    def load(self, state: Value) -> Value:
        load_learner(self._sync.learner, state)
        return True

    def resume_at(self, steps: int) -> Value:
        """Resume from a checkpoint at this step, with new episodes instead of those of the start."""
        self._sync.vec.reset(seeding.component_seed(self._seed, "train", "actor", 0, steps))
        return True

    def state(self) -> Value:
        return to_arrays(self._sync.learner.state_dict())

    def join_exchange(self, *where: Value) -> Value:
        """Join the other workers; returns None, or why that failed."""
        try:
            self._exchange.join(*where)
        except PeerLost as lost:
            return str(lost)
        return None

    def work(self, turn: int, base: int, num_workers: int, rounds: int, returns: Value) -> Value:
        """Act and learn for `rounds` iterations; `base`: steps of all workers; `returns`: their return moments."""
        sync, metrics, lost = self._sync, dict[str, list[float]](), None
        known = self._returns()
        if known is not None and (num_workers > 1 or not known.count):
            known.load_state_dict(returns)
        before, steps = copy.copy(known), sync.env_steps
        sync.set_shared_progress(base, num_workers)
        try:
            self._exchange.begin(sync.learner.flat.weights.data, turn, num_workers)
            for _ in range(rounds):
                for name, values in sync.advance().items():
                    metrics.setdefault(name, []).extend(map(float, values))
            self._exchange.end()
        except PeerLost as error:
            lost = str(error)
        notes, self._notes[:] = list(self._notes), []
        return {
            "lost": lost,
            "steps": sync.env_steps - steps,
            "metrics": {name: float(np.mean(values)) for name, values in metrics.items()},
            "episodes": sync.episodes.new_rows(self._first_id),
            "returns": None if known is None else known.since(before).state_dict(),  # type: ignore[arg-type]
            "version": sync.learner.version,
            "skipped": sync.learner.skipped,
            "restarts": sync.vec.restarts,
            "shows_masks": sync.vec.shows_masks,
            "simulator_steps": simulator_steps(sync.policy),
            "exchange": self._exchange.metrics(),
            "notes": notes,
        }

    def close(self) -> None:
        if hasattr(self, "_exchange"):
            self._exchange.close()
        if hasattr(self, "_sync"):
            self._sync.close()

    def _returns(self) -> RunningMoments | None:
        """Moments of the discounted returns, where rewards are normalised."""
        vec = self._sync.vec
        return vec.statistics.returns if isinstance(vec, NormalizedVecEnv) else None
