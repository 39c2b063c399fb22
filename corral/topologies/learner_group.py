"""Several learners: each learns from its share of every batch, and all apply the same updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from corral.acting.policy import to_numpy
from corral.config.experiment import Experiment
from corral.core import seeding
from corral.core.encoding import Value
from corral.core.errors import RunFailed
from corral.core.types import EnvSpec, LossOutput, Positions, Sample, Trajectory, Transitions, slice_envs, tree_map
from corral.data.pack import pack, unpack_batch
from corral.learn.device import Precision
from corral.learn.exchange.all_reduce import AllReduce, open_store
from corral.learn.exchange.base import PeerLost
from corral.learn.learner import Learner
from corral.learn.threads import set_threads
from corral.learn.weights import to_arrays
from corral.runtimes.base import Mailbox, Runtime
from corral.runtimes.supervised_role import SupervisedRole, collect
from corral.topologies.base import Note, build_model, load_learner, make_algorithm, role_factory

_UPDATE_TIMEOUT_S = 600.0  # for all to reach an update; crashed learners are detected at once
_BUILD_S = 300.0
_ANSWER_S = 60.0  # after an update that all have made, or that has failed for all
_TRIES = 5
Batch = Trajectory | Transitions | Positions


class PeerLearner:
    """The role of a learner other than the first."""

    def __init__(
        self, experiment: Experiment, spec: Value, precision: Precision, index: int, start: int, mailbox: Mailbox
    ):
        self._spec = EnvSpec.from_json(spec)
        algo = make_algorithm(experiment, self._spec)
        model = build_model(algo, experiment.seed, experiment.device, rank=index)
        set_threads(1)
        order = torch.Generator().manual_seed(
            seeding.component_seed(experiment.seed, "train", "learning", index, start)
        )
        self._exchange = AllReduce()
        # A non-finite value is so for all learners; the first one reports it.
        self._learner = Learner(algo, model, order, precision, self._exchange)

    def ready(self) -> Value:
        return True

    def load(self, state: Value) -> Value:
        load_learner(self._learner, state)
        return True

    def join_exchange(self, *where: Value) -> Value:
        """Join the other learners; whether that succeeded."""
        try:
            self._exchange.join(*where)
        except PeerLost:
            return False
        return True

    def learn(self, batch: Value, progress: float, reward_scale: float) -> Value:
        """Make a batch's updates with the others; returns whether all were made, and priorities of its transitions."""
        try:
            outputs = self._learner.step(Sample(unpack_batch(batch, self._spec)), progress, reward_scale)
        except PeerLost:
            return {"whole": False, "priorities": None}
        priorities = outputs[0].priorities if outputs else None
        return {"whole": True, "priorities": None if priorities is None else to_numpy(priorities)}

    def close(self) -> None:
        self._exchange.leave()


class LearnerGroup:
    """The first learner, in this process, and its peers.

    If a peer crashes, the rest of the batch is dropped and the others continue with the first learner's state; the peer
    rejoins after its restart.
    """

    def __init__(
        self, learner: Learner, exchange: AllReduce, precision: Precision, experiment: Experiment, spec: EnvSpec,
        runtime: Runtime, note: Note,
    ):  # fmt: skip
        self._learner, self._exchange, self._spec, self._runtime = learner, exchange, spec, runtime
        self._store = open_store(runtime.host)
        self._group_number = 0
        self._active_peers: list[SupervisedRole] | None = None  # peers in the current group
        self.dropped_batches = 0
        """Batches dropped because a learner crashed."""
        args, limit = (experiment, spec.to_json(), precision), experiment.actor_learner.max_restarts
        self.members = [
            SupervisedRole(runtime, f"learner {k}", role_factory(PeerLearner, *args, k), note, limit)
            for k in range(1, experiment.actor_learner.learners)
        ]
        for member in self.members:
            member.call("ready")

    def step(self, sample: Sample, progress: float, reward_scale: float) -> list[LossOutput]:
        if self._restart_peers() or self._active_peers is None:
            self._rejoin()
        assert self._active_peers is not None
        shares: list[Any] = _split(sample.batch, 1 + len(self._active_peers))
        for member, share in zip(self._active_peers, shares[1:], strict=True):
            member.call("learn", pack(share, self._spec), progress, reward_scale)
        try:
            outputs = self._learner.step(Sample(shares[0]), progress, reward_scale)
        except PeerLost:
            self.disband()
            self.dropped_batches += 1
            return []
        active, answers = self._active_peers, self._collect(self._active_peers, _ANSWER_S)
        if len(answers) < len(active) or not all(answer["whole"] for answer in answers):
            self.disband()
            answers = []
        if outputs and outputs[0].priorities is not None and sample.keys is not None:
            priorities = [to_numpy(outputs[0].priorities), *(answer["priorities"] for answer in answers)]
            outputs[0].priorities = np.concatenate(priorities)
            sample.keys = sample.keys[: len(outputs[0].priorities)]
        return outputs

    def metrics(self) -> dict[str, float]:
        return {
            "learners/alive": 1.0 + sum(member.alive for member in self.members),
            "learners/restarts": float(sum(member.restarts for member in self.members)),
            "learners/dropped_batches": float(self.dropped_batches),
        }

    def disband(self) -> None:
        """Leave the group; before the next update all join again and load the first learner's state."""
        self._exchange.leave()  # unblocks learners that wait for this one
        if self._active_peers is not None:
            self._collect([member for member in self._active_peers if member.calls], _ANSWER_S)
        self._active_peers = None

    def _restart_peers(self) -> bool:
        """Restart lost peers; returns whether one became ready. Called between updates, with no other calls pending."""
        for member in self.members:
            if member.restart_if_due():
                member.call("ready")
        coming = [member for member in self.members if member.calls]
        if self._group_number and coming:
            self._runtime.wait([member.calls[0] for member in coming], 0.0)
            coming = [member for member in coming if member.calls[0].done]
        return bool(self._collect(coming, _BUILD_S))  # the first time, wait for all

    def _rejoin(self) -> None:
        """Join all built peers; those that do not come are marked as lost."""
        for _ in range(_TRIES):
            self.disband()
            ready = [member for member in self.members if member.alive and not member.calls]
            state = self._runtime.share(to_arrays(self._learner.state_dict()))
            for member in ready:
                member.call("load", state)
            self._collect(ready, _BUILD_S)
            ready = [member for member in ready if member.alive]
            self._group_number += 1
            where = self._runtime.host, self._store.port, self._group_number
            size = 1 + len(ready)
            for rank, member in enumerate(ready, 1):
                member.call("join_exchange", *where, rank, size, _UPDATE_TIMEOUT_S)
            joined = True
            try:
                self._exchange.join(*where, 0, size, _UPDATE_TIMEOUT_S)
            except PeerLost:
                joined = False
            answers = self._collect(ready, _ANSWER_S)
            if joined and len(answers) == len(ready) and all(answers):
                self._active_peers = ready
                return
        raise RunFailed(f"The learners could not connect to each other in {_TRIES} tries: set learners=1.")

    def _collect(self, members: Sequence[SupervisedRole], timeout_s: float) -> list[Any]:
        """Answers of the members that reply in time; the others are marked as lost."""
        return list(collect(self._runtime, members, timeout_s, SupervisedRole.mark_lost).values())


def _split(batch: Batch, parts: int) -> list[Any]:
    """Shares of equal size; the remainder is dropped."""
    if isinstance(batch, Trajectory):
        size = batch.shape[1] // parts
        return [slice_envs(batch, np.arange(k * size, (k + 1) * size)) for k in range(parts)]
    size = len(batch.outcome if isinstance(batch, Positions) else batch.reward) // parts
    return [_rows(batch, slice(k * size, (k + 1) * size)) for k in range(parts)]


def _rows(batch: Transitions | Positions, rows: slice) -> Transitions | Positions:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return type(batch)(**{name: tree_map(lambda leaf: leaf[rows], value) for name, value in values.items()})
