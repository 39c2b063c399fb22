"""The actor role: acts in some environments with a copy of the network, and sends fragments on request.

In the topology `central_inference` (SEED, Espeholt et al. 2019) one actor serves all environments. They run in worker
processes or Ray actors that send observations through shared memory or the object store and receive actions. It acts
for the environments that are ready, keeps their recurrent states, and assembles the fragments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from corral.acting.policy import ActContext, simulator_steps
from corral.acting.sampler import Sampler
from corral.config.experiment import Experiment
from corral.core import seeding
from corral.core.encoding import Value
from corral.core.machine import cores
from corral.core.types import Trajectory
from corral.data.pack import pack
from corral.learn.threads import set_threads
from corral.learn.weights import FlatParams
from corral.nets.network import use_precision
from corral.runtimes.base import Mailbox
from corral.topologies.base import build_model, make_algorithm, make_train_vec
from corral.topologies.shared_returns import ActorReturns
from corral.topologies.weight_channel import weights_mode

_WEIGHTS_S = 300.0  # timeout for new weights: the learner may be busy with a large batch
_LINGER_S = 0.002  # to wait for half of all environments before acting for those that are ready
_MIN_ROWS = 50  # per message, for algorithms that would otherwise send single steps (as in Ape-X)


class Actor:
    """Acts with the newest weights in its mailbox; they never change within a fragment.

    The first actor of a run draws the same random numbers as the topology `sync`. An actor that replaces a lost one has
    its own seeds, so that it does not repeat the same episodes.
    """

    def __init__(self, experiment: Experiment, index: int, start: int, mailbox: Mailbox):
        self._mailbox, self._experiment = mailbox, experiment
        seed = self._seed = experiment.seed
        self._index = index
        central = experiment.topology == "central_inference"
        count = experiment.num_envs if central else experiment.envs_per_actor
        self._first_id = index * count
        env_seed = seeding.component_seed(seed, "train", "actor", index, start) if index or start else seed
        backend, workers, free = experiment.backend, experiment.workers, 1  # one of several: each has a core
        if central:
            workers, free = experiment.actors, max(1, cores() - 1)  # this process computes the actions
            if backend == "auto":
                backend = "ray" if experiment.runtime == "ray" else "process"
        self._vec = make_train_vec(experiment, count, env_seed, backend, workers, cores=free)
        self._algo = make_algorithm(experiment, self._vec.spec)
        # On Ray, roles other than the driver have no GPU.
        on_device = central and experiment.runtime != "ray"
        self._model = build_model(self._algo, seed, experiment.device if on_device else "cpu")
        set_threads(1)
        self._flat = FlatParams(self._model, self._algo.groups())
        rng = np.random.default_rng(seeding.component_seed(seed, "train", "acting", index, start))
        in_step = weights_mode(experiment, self._algo.data.max_lag) == "sync"
        self._policy = self._algo.make_policy(self._model, explore=True, rng=rng, index=index)
        self._sampler = Sampler(self._vec, self._policy)
        steps = self._algo.fragment_steps(experiment.num_envs)
        if not in_step and self._algo.data.unit == "transition":
            steps = max(steps, -(-_MIN_ROWS // count))
        first_ready = None
        if not in_step and self._vec.pipelined:  # a slow environment does not delay the others
            first_ready = -(-count // 2) if central else 1
        self._rollouts: Iterator[Trajectory] = self._sampler.rollouts(
            steps, first_ready=first_ready, linger_s=_LINGER_S if central and first_ready else 0.0
        )
        self._returns = ActorReturns(self._vec, shared=not central and experiment.num_actors > 1)
        self._version = -1

    def resume_at(self, steps: int) -> Value:
        """Resume from a checkpoint at this step, with new episodes instead of those of the start."""
        self._vec.reset(seeding.component_seed(self._seed, "train", "actor", self._index, steps))
        return True

    def describe(self) -> Value:
        return self._vec.spec.to_json()

    def sample(self, least: int, progress: float, returns: dict[str, Any]) -> Value:
        """A fragment sampled with weights of at least version `least`, and the episodes that ended in it.

        `returns` are moments of all actors' returns, where rewards are normalised.
        """
        mail = self._mailbox.wait("weights", lambda mail: bool(mail["version"] >= least), _WEIGHTS_S)
        if mail["version"] != self._version:
            self._load(mail)
        self._returns.begin(returns)
        self._sampler.set_context(ActContext(progress, self._version, self._vec.learning_scale))
        traj = next(self._rollouts)
        traj.env_id += self._first_id
        scale = self._vec.reward_scale
        return {
            "traj": pack(traj, self._vec.spec),
            "priorities": self._algo.priorities(self._model, replace(traj, reward=traj.reward * np.float32(scale))),
            "reward_scale": scale,
            "learning_scale": self._vec.learning_scale,
            "returns": self._returns.end(),
            "simulator_steps": simulator_steps(self._policy),
            "episodes": self._sampler.episodes.new_rows(self._first_id),
            "restarts": self._vec.restarts,
            "shows_masks": self._vec.shows_masks,
            "faults": self._vec.new_faults(),
        }

    def close(self) -> None:
        self._vec.close()

    def _load(self, mail: dict[str, Any]) -> None:
        first = self._version < 0
        self._version = mail["version"]
        self._flat.weights.data.copy_(torch.from_numpy(mail["weights"]))
        buffers = dict(self._model.named_buffers())
        for name, value in mail["buffers"].items():
            buffers[name].copy_(torch.from_numpy(value))
        if first:  # what was faster on another device says nothing about this one
            same = mail["device"] == self._flat.weights.device.type
            use_precision(self._model, mail["precision"] if same else "fp32")
