"""How the workers of each exchange find each other, and their combined state."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from corral.config.experiment import Experiment
from corral.core.encoding import Value
from corral.core.types import EnvSpec
from corral.learn.exchange.all_reduce import open_store
from corral.learn.exchange.base import find_exchange
from corral.learn.exchange.param_server_process import ParamServerProcess, server_slices
from corral.learn.exchange.peers import own_address
from corral.learn.learner import Learner
from corral.learn.weights import FlatParams, mean_state, to_arrays
from corral.runtimes.base import Mailbox, Runtime
from corral.runtimes.supervised_role import SupervisedRole
from corral.topologies.base import Note, build_model, load_learner, make_algorithm, role_factory

# Timeout of an update: as long as a slow simulator may take, many times a step's deadline. A crashed worker is noticed
# at once by its connection, a frozen one by the runtime.
UPDATE_TIMEOUT_S = 600.0
JOIN_TIMEOUT_S = 120.0  # to join a group
ANSWER_S = 60.0

Ask = Callable[[Sequence[SupervisedRole], str, Sequence[Sequence[Value]], float], dict[SupervisedRole, Value]]
"""Calls a method of several members, each with its own arguments, and waits; members that do not answer are lost."""


@dataclass(frozen=True)
class RendezvousSetup:
    """Arguments for building a Rendezvous."""

    experiment: Experiment
    spec: EnvSpec
    learner: Learner
    runtime: Runtime
    secret: bytes
    note: Note
    ask: Ask


def make_rendezvous(setup: RendezvousSetup) -> Rendezvous:
    """The rendezvous of the run's exchange."""
    made: Rendezvous = pkgutil.resolve_name(find_exchange(setup.experiment.data_parallel.exchange).rendezvous)(setup)
    return made


class Rendezvous(ABC):
    """Connects the workers of an exchange and combines their states."""

    rejoin_on_loss = False
    """Whether the other workers must join again when one of them is lost."""

    def __init__(self, setup: RendezvousSetup):
        self._ask = setup.ask
        self.members: list[SupervisedRole] = []
        """Roles besides the workers."""
        self._met: set[tuple[SupervisedRole, int]] = set()  # workers that loaded a state, with their number of restarts

    @abstractmethod
    def gather(self, workers: list[SupervisedRole], addresses: dict[SupervisedRole, Value], state: Value) -> bool:
        """Connect these workers, loading `state` where needed; False if a worker did not respond."""

    def state(self, workers: list[SupervisedRole]) -> Value | None:
        """The workers' combined state, by default that of the first one that answers; None if none is left."""
        for member in list(workers):  # workers that do not answer are removed from the list
            if answer := self._ask([member], "state", [[]], ANSWER_S):
                return answer[member]
        return None

    def keep(self) -> None:  # noqa: B027 - only servers have a state
        """Save the state of `members`, to restart them from it; called every few seconds."""

    def restart_if_due(self) -> bool:
        """Restart lost `members`; whether one was restarted, so that all have to join again."""
        return False

    def metrics(self) -> dict[str, float]:
        return {}

    def _load_new(self, workers: list[SupervisedRole], state: Value) -> bool:
        """Load the state into workers that have none yet; False if one did not answer."""
        new = [member for member in workers if (member, member.restarts) not in self._met]
        loaded = self._ask(new, "load", [[state]] * len(new), ANSWER_S)
        self._met |= {(member, member.restarts) for member in loaded}
        return len(loaded) == len(new)


class AllReduceRendezvous(Rendezvous):
    """All workers have the same state, and join at a store in this process."""

    rejoin_on_loss = True

    def __init__(self, setup: RendezvousSetup):
        super().__init__(setup)
        self._runtime, self._store = setup.runtime, open_store(setup.runtime.host)
        self._group_number = 0

    def gather(self, workers: list[SupervisedRole], addresses: dict[SupervisedRole, Value], state: Value) -> bool:
        """Load the same state into all workers and join them into a new group."""
        loaded = self._ask(workers, "load", [[state]] * len(workers), ANSWER_S)
        if len(loaded) < len(workers):
            return False
        self._group_number += 1
        where = self._runtime.host, self._store.port, self._group_number
        joined = self._ask(
            workers,
            "join_exchange",
            [[*where, rank, len(workers), UPDATE_TIMEOUT_S] for rank in range(len(workers))],
            JOIN_TIMEOUT_S,
        )
        return len(joined) == len(workers) and all(answer is None for answer in joined.values())


class GossipRendezvous(Rendezvous):
    """Each worker has its own state; the combined state is their mean."""

    def __init__(self, setup: RendezvousSetup):
        super().__init__(setup)
        self._group_number, self._distance = 0, 0.0

    def gather(self, workers: list[SupervisedRole], addresses: dict[SupervisedRole, Value], state: Value) -> bool:
        """New workers load the mean; then all get the addresses of all."""
        if not self._load_new(workers, state):
            return False
        self._group_number += 1
        peers = [addresses[member] for member in workers]
        joined = self._ask(
            workers, "join_exchange", [[peers, rank, self._group_number] for rank in range(len(workers))], ANSWER_S
        )
        return len(joined) == len(workers)

    def state(self, workers: list[SupervisedRole]) -> Value | None:
        states = list(self._ask(workers, "state", [[]] * len(workers), ANSWER_S).values())
        if not states:
            return None
        mean = mean_state(states)
        self._distance = max(_distance(state["model"], mean["model"]) for state in states)
        return mean

    def metrics(self) -> dict[str, float]:
        """The largest distance of a worker from the mean, as last measured."""
        return {"exchange/consensus_distance": self._distance}


def _distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Distance between the weights of two networks, relative to the norm of the second."""
    names = [name for name, value in other.items() if value.dtype == np.float32]  # statistics are float64
    difference = sum(float(np.square(one[name] - other[name], dtype=np.float64).sum()) for name in names)
    size = sum(float(np.square(other[name], dtype=np.float64).sum()) for name in names)
    return float(np.sqrt(difference / max(size, 1e-24)))


class ServerRendezvous(Rendezvous):
    """Parameter servers in their own processes, which resume from their last saved state.

    The servers hold the weights and the optimizer; the rest of the learner's state is taken from any worker.
    """

    def __init__(self, setup: RendezvousSetup):
        super().__init__(setup)
        self._secret, self._learner = setup.secret, setup.learner
        runtime, limit = setup.runtime, setup.experiment.actor_learner.max_restarts
        args = setup.experiment, setup.spec.to_json(), runtime.host, setup.secret
        self.members = [
            SupervisedRole(runtime, f"server {k}", role_factory(ServerRole, *args, k), setup.note, limit)
            for k in range(setup.experiment.data_parallel.servers)
        ]
        count = len(self.members)
        of_groups = [server_slices(group.where, count) for group in setup.learner.flat.groups]
        self._slices = [[parts[k] for parts in of_groups] for k in range(count)]
        """Each server's slices of the flat weights, one per group."""
        self._last: list[Value] = [None] * len(self.members)  # states to restart from
        self._empty = set(self.members)  # servers without a state
        self._addresses: dict[SupervisedRole, Value] = {}
        self._metrics: dict[str, float] = {}

    def gather(self, workers: list[SupervisedRole], addresses: dict[SupervisedRole, Value], state: Value) -> bool:
        """Servers without a state get one; new workers load the state, and all connect."""
        if any(not server.alive for server in self.members):
            return False
        self._split_state(state)
        for server in list(self._empty):
            k = self.members.index(server)
            answer = self._ask([server], "open", [[self._last[k]]], ANSWER_S)
            if not answer:
                return False
            self._addresses[server] = answer[server]
            self._empty.discard(server)
        # Existing workers keep their statistics, because moments still in flight to them exist nowhere else.
        if not self._load_new(workers, state):
            return False
        where = [[self._addresses[server] for server in self.members], self._secret, UPDATE_TIMEOUT_S]
        joined = self._ask(workers, "join_exchange", [where] * len(workers), JOIN_TIMEOUT_S)
        if len(joined) == len(workers) and all(answer is None for answer in joined.values()):
            return True
        self.keep()  # detects and restarts a lost server
        return False

    def _split_state(self, state: Value) -> None:
        load_learner(self._learner, state)
        weights = self._learner.flat.weights.detach().cpu().numpy()
        optimizers = self._learner.split_optimizer(state["optimizer"])
        starts = [group.where.start for group in self._learner.flat.groups]
        for k, parts in enumerate(self._slices):
            if self._last[k] is None:
                self._last[k] = {
                    "version": state["version"],
                    "parts": [
                        {"weights": weights[s].copy(), "optimizer": _cut(optimizer, s.start - at, s.stop - at)}
                        for s, optimizer, at in zip(parts, optimizers, starts, strict=True)
                    ],
                }

    def state(self, workers: list[SupervisedRole]) -> Value | None:
        self.keep()
        state = super().state(workers)
        return state if state is None or any(last is None for last in self._last) else self._whole(state)

    def _whole(self, state: Value) -> Value:
        """A worker's state with the weights and the optimizer of the servers."""
        learner = self._learner
        load_learner(learner, state)
        with torch.no_grad():
            for parts, last in zip(self._slices, self._last, strict=True):
                for s, part in zip(parts, last["parts"], strict=True):
                    learner.flat.weights[s].copy_(torch.from_numpy(np.array(part["weights"])))
        groups = range(len(learner.flat.groups))
        optimizer = learner.join_optimizers(
            [_joined([last["parts"][group]["optimizer"] for last in self._last]) for group in groups]
        )
        whole = to_arrays(learner.state_dict())
        return {**whole, "optimizer": optimizer, "version": self._last[0]["version"], "skipped": state["skipped"]}

    def keep(self) -> None:
        """Save the servers' states and metrics."""
        running = [server for server in self.members if server.alive and server not in self._empty]
        answers = self._ask(running, "report", [[]] * len(running), ANSWER_S)
        for server, (state, metrics) in answers.items():
            self._last[self.members.index(server)] = state
            self._metrics = {**metrics, "learn/version": float(state["version"])}

    def restart_if_due(self) -> bool:
        """Restart lost servers, each from its last known state."""
        started = [server for server in self.members if server.restart_if_due()]
        self._empty |= {server for server in self.members if not server.alive} | set(started)
        return bool(started)

    def metrics(self) -> dict[str, float]:
        return self._metrics


def _cut(optimizer: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The optimizer state for a slice of its weights."""
    return {
        name: value[start:stop] if isinstance(value, np.ndarray) and value.ndim else value
        for name, value in optimizer.items()
    }


def _joined(optimizers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The optimizer state from those of its slices."""
    return {
        name: np.concatenate([part[name] for part in optimizers])
        if isinstance(value, np.ndarray) and value.ndim else value
        for name, value in optimizers[0].items()
    }  # fmt: skip


class ServerRole:
    """A parameter server in its own process."""

    def __init__(
        self, experiment: Experiment, spec: Value, host: str, secret: bytes, index: int, start: int, mailbox: Mailbox
    ):
        config = experiment.data_parallel
        algo = make_algorithm(experiment, EnvSpec.from_json(spec))
        groups = algo.groups()
        flat = FlatParams(build_model(algo, experiment.seed), groups)
        torch.set_num_threads(1)
        parts = [
            (flat.weights.detach()[server_slices(part.where, config.servers)[index]], group.optimizer)
            for part, group in zip(flat.groups, groups, strict=True)
        ]
        self._address = own_address(host)
        self._make = partial(ParamServerProcess, parts, config, self._address, secret)
        self._server: ParamServerProcess | None = None

    def open(self, state: Value) -> Value:
        """Serve from this state; returns the address."""
        if self._server is None:
            self._server = self._make()
        self._server.load(state)
        return [self._address, self._server.port]

    def report(self) -> Value:
        assert self._server is not None
        return [self._server.state(), self._server.metrics()]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
