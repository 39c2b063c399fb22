"""How the workers of each exchange find each other, and their combined state."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from corral.config.experiment import Experiment
from corral.core.encoding import Value
from corral.core.types import EnvSpec
from corral.learn.exchange.all_reduce import open_store
from corral.learn.exchange.compress import broadcast_codec, gradient_codec
from corral.learn.exchange.make import find_exchange
from corral.learn.exchange.peers import own_address
from corral.learn.exchange.server import ParamServerProcess, Rules, server_slices
from corral.learn.learner import Learner
from corral.learn.weights import FlatParams, mean_state, to_arrays, to_tensors
from corral.runtimes.base import Mailbox, MakeRole, Runtime
from corral.runtimes.supervised_role import SupervisedRole
from corral.topologies.base import Note, build_model, make_algorithm

# Timeout of an update: as long as a slow simulator may take, many times a step's deadline. A crashed worker is noticed
# at once by its connection, a frozen one by the runtime.
TOGETHER_S = 600.0
MEET_S = 120.0  # to join a group
ANSWER_S = 60.0

Ask = Callable[[Sequence[SupervisedRole], str, Sequence[Sequence[Value]], float], dict[SupervisedRole, Value]]
"""Calls a method of several members, each with its own arguments, and waits; those without an answer are lost."""


@dataclass(frozen=True)
class RendezvousSetup:
    """What a rendezvous may need of the run."""

    experiment: Experiment
    spec: EnvSpec
    learner: Learner
    runtime: Runtime
    secret: bytes
    note: Note
    ask: Ask


def make_rendezvous(setup: RendezvousSetup) -> Rendezvous:
    """How the workers of the run's exchange meet."""
    module, _, name = find_exchange(setup.experiment.data_parallel.exchange).rendezvous.partition(":")
    made: Rendezvous = getattr(importlib.import_module(module), name)(setup)
    return made


class Rendezvous(Protocol):
    """What is different about an exchange, seen from the run. Made from a `RendezvousSetup`."""

    members: list[SupervisedRole]
    """Roles besides the workers."""
    re_form: bool
    """Whether the others must join again when one of them is lost."""

    def gather(self, workers: list[SupervisedRole], addresses: dict[SupervisedRole, Value], state: Value) -> bool:
        """Join these workers, with this state where they need one; False if a worker did not come."""

    def state(self, workers: list[SupervisedRole]) -> Value | None:
        """The workers' combined state; None if none is left."""

    def keep(self) -> None:
        """Remember the state of what is not in the workers, for when it is lost; called every few seconds."""

    def revive(self) -> bool:
        """Start lost processes again; True when one was, and all have to meet."""

    def metrics(self) -> dict[str, float]: ...


class AllReduceRendezvous:
    """All workers have the same state, and join at a store in this process."""

    re_form = True

    def __init__(self, setup: RendezvousSetup):
        self.members: list[SupervisedRole] = []
        self._runtime, self._ask = setup.runtime, setup.ask
        self._store = open_store(setup.runtime.host)
        self._meetings = 0

    def gather(self, workers: list[SupervisedRole], addresses: dict[SupervisedRole, Value], state: Value) -> bool:
        """Load the same state into all workers and join them into a new group."""
        loaded = self._ask(workers, "load", [[state]] * len(workers), ANSWER_S)
        if len(loaded) < len(workers):
            return False
        self._meetings += 1
        where = self._runtime.host, self._store.port, self._meetings
        joined = self._ask(
            workers, "meet", [[*where, rank, len(workers), TOGETHER_S] for rank in range(len(workers))], MEET_S
        )
        return len(joined) == len(workers) and all(answer is None for answer in joined.values())

    def state(self, workers: list[SupervisedRole]) -> Value | None:
        for member in list(workers):  # workers without an answer are removed
            if answer := self._ask([member], "state", [[]], ANSWER_S):
                return answer[member]
        return None

    def keep(self) -> None:
        """The workers have it all."""

    def revive(self) -> bool:
        """There is nothing else to start."""
        return False

    def metrics(self) -> dict[str, float]:
        return {}


class GossipRendezvous:
    """Each worker has its own state; the combined state is their mean."""

    re_form = False

    def __init__(self, setup: RendezvousSetup):
        self.members: list[SupervisedRole] = []
        self._ask, self._meetings, self._met = setup.ask, 0, set[tuple[SupervisedRole, int]]()
        self._distance = 0.0

    def gather(self, workers: list[SupervisedRole], addresses: dict[SupervisedRole, Value], state: Value) -> bool:
        """New workers load the mean; then all get the addresses of all."""
        new = [member for member in workers if (member, member.restarts) not in self._met]
        loaded = self._ask(new, "load", [[state]] * len(new), ANSWER_S)
        self._met |= {(member, member.restarts) for member in loaded}
        if len(loaded) < len(new):
            return False
        self._meetings += 1
        peers = [addresses[member] for member in workers]
        joined = self._ask(workers, "meet", [[peers, rank, self._meetings] for rank in range(len(workers))], ANSWER_S)
        return len(joined) == len(workers)

    def state(self, workers: list[SupervisedRole]) -> Value | None:
        states = list(self._ask(workers, "state", [[]] * len(workers), ANSWER_S).values())
        if not states:
            return None
        mean = mean_state(states)
        self._distance = max(_distance(state["model"], mean["model"]) for state in states)
        return mean

    def keep(self) -> None:
        """The workers have it all."""

    def revive(self) -> bool:
        """There is nothing else to start."""
        return False

    def metrics(self) -> dict[str, float]:
        """The largest distance of a worker from the mean, as last measured."""
        return {"exchange/consensus_distance": self._distance}


def _distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Distance between the weights of two networks, relative to the norm of the second."""
    names = [name for name, value in other.items() if value.dtype == np.float32]  # statistics are float64
    apart = sum(float(np.square(one[name] - other[name], dtype=np.float64).sum()) for name in names)
    size = sum(float(np.square(other[name], dtype=np.float64).sum()) for name in names)
    return float(np.sqrt(apart / max(size, 1e-24)))


class ServerRendezvous:
    """Parameter servers in their own processes, which resume from their last state.

    The servers hold the weights and the optimizer; the rest of the learner's state is taken from any worker.
    """

    re_form = False

    def __init__(self, setup: RendezvousSetup):
        self._ask, self._secret, self._learner = setup.ask, setup.secret, setup.learner
        runtime, limit = setup.runtime, setup.experiment.actor_learner.max_restarts
        make = partial(_make_server, setup.experiment, setup.spec.to_json(), runtime.host, setup.secret)
        self.members = [
            SupervisedRole(runtime, f"server {k}", partial(make, k), setup.note, limit)
            for k in range(setup.experiment.data_parallel.servers)
        ]
        count = len(self.members)
        of_groups = [server_slices(group.where, count) for group in setup.learner.flat.groups]
        self._slices = [[parts[k] for parts in of_groups] for k in range(count)]
        """Each server's slices of the flat weights, one per group."""
        self._last: list[Value] = [None] * len(self.members)  # states to restart from
        self._empty = set(self.members)  # servers without a state
        self._addresses: dict[SupervisedRole, Value] = {}
        self._told: dict[str, float] = {}
        self._met: set[tuple[SupervisedRole, int]] = set()  # workers, with their number of restarts

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
        # The other workers keep their statistics: moments in flight to them are nowhere else.
        new = [member for member in workers if (member, member.restarts) not in self._met]
        loaded = self._ask(new, "load", [[state]] * len(new), ANSWER_S)
        self._met |= {(member, member.restarts) for member in loaded}
        if len(loaded) < len(new):
            return False
        where = [[self._addresses[server] for server in self.members], self._secret, TOGETHER_S]
        joined = self._ask(workers, "meet", [where] * len(workers), MEET_S)
        if len(joined) == len(workers) and all(answer is None for answer in joined.values()):
            return True
        self.keep()  # detects and restarts a lost server
        return False

    def _split_state(self, state: Value) -> None:
        self._learner.load_state_dict({**to_tensors(state), "rng": self._learner.state_dict()["rng"]})
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
        for member in list(workers):  # workers without an answer are removed
            if answer := self._ask([member], "state", [[]], ANSWER_S):
                return self._whole(answer[member])
        return None

    def _whole(self, state: Value) -> Value:
        if any(last is None for last in self._last):
            return state
        learner = self._learner
        learner.load_state_dict({**to_tensors(state), "rng": learner.state_dict()["rng"]})
        with torch.no_grad():
            for parts, last in zip(self._slices, self._last, strict=True):
                for s, part in zip(parts, last["parts"], strict=True):
                    learner.flat.weights[s].copy_(torch.from_numpy(np.array(part["weights"])))
        optimizer = learner.join_optimizers(
            [
                _joined([last["parts"][group]["optimizer"] for last in self._last])
                for group in range(len(learner.flat.groups))
            ]
        )
        whole = to_arrays(learner.state_dict())
        return {**whole, "optimizer": optimizer, "version": self._last[0]["version"], "skipped": state["skipped"]}

    def keep(self) -> None:
        """Save the servers' states, in case one crashes, and their metrics."""
        standing = [server for server in self.members if server.alive and server not in self._empty]
        told = self._ask(standing, "tell", [[]] * len(standing), ANSWER_S)
        for server, (state, metrics) in told.items():
            self._last[self.members.index(server)] = state
            self._told = {**metrics, "learn/version": float(state["version"])}

    def revive(self) -> bool:
        """Restart lost servers, each from its last known state."""
        started = [server for server in self.members if server.revive()]
        self._empty |= {server for server in self.members if not server.alive} | set(started)
        return bool(started)

    def metrics(self) -> dict[str, float]:
        return self._told


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
        self, experiment: Experiment, spec: Value, host: str, secret: bytes, index: int, mailbox: Mailbox
    ):  # fmt: skip
        config = experiment.data_parallel
        algo = make_algorithm(experiment, EnvSpec.from_json(spec))
        groups = algo.groups()
        flat = FlatParams(build_model(algo, experiment.seed, torch.device("cpu")), groups)
        torch.set_num_threads(1)
        parts = [
            (flat.weights.detach()[server_slices(part.where, config.servers)[index]], group.optimizer)
            for part, group in zip(flat.groups, groups, strict=True)
        ]
        self._address = own_address(host)
        self._make = partial(
            ParamServerProcess, parts, Rules(*config.rule, config.backup_workers),
            gradient_codec(config), broadcast_codec(config), self._address, secret,
        )  # fmt: skip
        self._server: ParamServerProcess | None = None

    def open(self, state: Value) -> Value:
        """Serve from this state; returns the address."""
        if self._server is None:
            self._server = self._make()
        self._server.load(state)
        return [self._address, self._server.port]

    def tell(self) -> Value:
        assert self._server is not None
        return [self._server.state(), self._server.metrics()]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def _make_server(experiment: Experiment, spec: Value, host: str, secret: bytes, index: int, start: int) -> MakeRole:
    return lambda mailbox: ServerRole(experiment, spec, host, secret, index, mailbox)
