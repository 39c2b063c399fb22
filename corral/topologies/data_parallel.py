"""Workers that act and learn like `sync`, and exchange gradients or weights: DPPO, A3C, stale synchronous, gossip."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from corral.acting.episode_stats import Episode, EpisodeStats
from corral.acting.policy import Policy
from corral.config.experiment import Experiment
from corral.core.encoding import Value
from corral.core.errors import RunFailed, UserError
from corral.core.machine import cores
from corral.core.types import EnvSpec
from corral.envs.normalize import RunningMoments
from corral.learn.exchange.peers import new_secret
from corral.learn.weights import to_arrays
from corral.runtimes.base import RoleLost, make_runtime, require_room
from corral.runtimes.supervised_role import SupervisedRole, collect
from corral.topologies.base import (
    Note,
    PolicySnapshot,
    Topology,
    choose_runtime,
    load_learner,
    planning_metrics,
    role_factory,
    start_limit_s,
)
from corral.topologies.rendezvous import ANSWER_S, RendezvousSetup, make_rendezvous
from corral.topologies.worker import Worker

_TURN_STEPS = 1024  # in a turn, over all workers; at least one round
_WORK_S = 3600.0  # for a turn; the runtime detects crashed and frozen workers
_POLL_S = 0.5
_KEEP_S = 1.0  # between saves of the servers' states
_TRIES = 5
_MAX_FAILED_TURNS = 50  # failed turns in a row, over all workers


class DataParallel(Topology):
    """The learner in this process never learns: it receives the workers' state for evaluation and checkpoints.

    A turn consists of rounds of acting and learning. With `mode=sync` all workers begin it together; otherwise each
    begins its next turn when it has finished one.
    """

    sees_rollouts = False
    saves_without_envs = False  # workers that wait for environments cannot give their state

    def __init__(self, experiment: Experiment, note: Note):
        super().__init__(experiment, note)
        servers = experiment.data_parallel.num_servers
        self._processes = experiment.num_actors + servers
        what = f"A run of {experiment.num_actors} workers" + (f" and {servers} parameter servers" if servers else "")
        name = choose_runtime(experiment)
        require_room(name, self._processes, what)
        self._runtime = make_runtime(name, experiment.actor_learner.silence_timeout_s)
        try:
            self._runtime.reserve(self._processes, what)
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        experiment, runtime = self.experiment, self._runtime
        secret, limit = new_secret(), experiment.actor_learner.max_restarts
        make = partial(role_factory, Worker, experiment, runtime.host, secret)
        self._workers = [
            SupervisedRole(runtime, f"worker {k}", make(k), self._note, limit) for k in range(experiment.num_actors)
        ]
        self._addresses: dict[SupervisedRole, Value] = {}
        self._ready: set[SupervisedRole] = set()  # built workers
        self._joined: list[SupervisedRole] = []  # workers that have joined the exchange
        self._rejoin_needed = True  # a role waits to join
        first = self._started(self._workers[:1], experiment.precision)
        self._precision = first["precision"]
        self._started(self._workers[1:], self._precision)
        self._build_learner(EnvSpec.from_json(first["spec"]), self._processes, precision=self._precision)
        self.thread_plan = self._describe_threads()
        self._rendezvous = make_rendezvous(
            RendezvousSetup(experiment, self.spec, self.learner, self._runtime, secret, self._note, self._ask)
        )
        self.episodes = EpisodeStats(experiment.num_envs)
        self._returns = RunningMoments()
        self._turn = 0
        self._round_steps = self.algo.fragment_steps(experiment.envs_per_actor) * experiment.envs_per_actor
        self._latest: dict[SupervisedRole, dict[str, Any]] = {}
        self._metrics: dict[str, list[float]] = {}
        self._pulled = -1  # steps at which this learner last received the workers' state
        self._kept = time.monotonic()
        self._waiting = False
        self._failed_turns = 0

    def _started(self, workers: Sequence[SupervisedRole], precision: str) -> Value:
        """Build these workers; returns the answer of one."""
        limit_s = start_limit_s(self.experiment)
        until, answer = time.monotonic() + limit_s, None
        missing = list(workers)
        while missing:
            for worker in missing:
                worker.restart_if_due()
                if worker.given_up or time.monotonic() > until:
                    raise RunFailed(f"{worker.name} did not start: see its output above, or use topology=sync.")
            alive = [worker for worker in missing if worker.alive]
            if not alive:
                time.sleep(_POLL_S / 10)
            built = self._ask(alive, "build", [[precision]] * len(alive), limit_s)
            for worker, answer in built.items():
                self._addresses[worker] = answer["address"]
                self._ready.add(worker)
                missing.remove(worker)
        return answer

    def advance(self) -> dict[str, list[float]]:
        self._metrics = {}
        if self._needs_rejoin():
            self._rejoin()
        if self._rejoin_needed or self._waiting:  # a role must return first
            self._end_turns()
            return self._metrics
        in_step = self.experiment.data_parallel.mode == "sync"
        idle = [worker for worker in self._joined if not worker.calls]
        if idle and (len(idle) == len(self._joined) or not in_step):
            self._begin(idle)
        self.awaits_envs = in_step
        self._collect([worker for worker in self._joined if worker.calls], wait_for_all=in_step)
        self.awaits_envs = False
        if time.monotonic() - self._kept > _KEEP_S:
            self._rendezvous.keep()
            self._kept = time.monotonic()
        return self._metrics

    def _begin(self, workers: list[SupervisedRole]) -> None:
        size = len(self._joined)
        left = -(-(self.experiment.steps - self.env_steps) // (size * self._round_steps))
        rounds = max(1, min(left, _TURN_STEPS // (size * self._round_steps)))
        self._turn += 1
        for worker in workers:
            worker.call("work", self._turn, self.env_steps, size, rounds, self._returns.state_dict())

    def _collect(self, workers: list[SupervisedRole], *, wait_for_all: bool) -> None:
        if not wait_for_all and workers:
            done = self._runtime.wait([worker.calls[0] for worker in workers], _POLL_S)
            workers = [worker for worker in workers if worker.calls[0] in done]
        for worker, answer in collect(self._runtime, workers, _WORK_S, self._mark_lost).items():
            self._take(worker, answer)

    def _take(self, worker: SupervisedRole, answer: dict[str, Any]) -> None:
        self.env_steps += answer["steps"]
        self._latest[worker] = answer
        self.shows_masks = self.shows_masks or answer["shows_masks"]
        for env_id, total, length in answer["episodes"]:
            self.episodes.finished += 1
            self.episodes.recent.append(Episode(env_id, total, length))
        for name, value in answer["metrics"].items():
            self._metrics.setdefault(name, []).append(value)
        if answer["returns"] is not None:
            new = RunningMoments()
            new.load_state_dict(answer["returns"])
            self._returns.merge(new)
        for kind, text in answer["notes"]:
            self._note(kind, f"{worker.name}: {text}")
        if answer["lost"] is not None:  # it continues when all have joined again
            self._rejoin_needed = True
            self._note("rejoin", f"{worker.name} could not complete an exchange and will rejoin: {answer['lost']}")
        self._failed_turns = self._failed_turns + 1 if answer["lost"] is not None else 0
        if self._failed_turns > _MAX_FAILED_TURNS:
            raise RunFailed(f"Workers cannot exchange updates ({answer['lost']}): check the network or set --actors 1.")

    def _mark_lost(self, member: SupervisedRole, why: str) -> None:
        member.mark_lost(why)
        if member not in self._workers:  # a server: all join again when it is back
            self._rejoin_needed = True
            return
        self._ready.discard(member)
        if member in self._joined:
            self._joined.remove(member)
            self._rejoin_needed |= self._rendezvous.rejoin_on_loss or not self._joined

    def _needs_rejoin(self) -> bool:
        """Restart lost roles; returns whether all workers must join the exchange again."""
        self._rejoin_needed |= self._rendezvous.restart_if_due()
        for worker in self._workers:
            if worker.restart_if_due():
                worker.call("build", self._precision)
        coming = [worker for worker in self._workers if worker.calls and worker not in self._joined]
        if coming:
            self._runtime.wait([worker.calls[0] for worker in coming], 0.0 if self._joined else _POLL_S)
        for worker in coming:
            if worker.calls[0].done:
                try:
                    self._addresses[worker] = worker.calls.popleft().result()["address"]
                    self._ready.add(worker)
                    self._rejoin_needed = True
                except RoleLost as lost:
                    worker.mark_lost(str(lost))
        left, needed = sum(not w.given_up for w in self._workers), self.experiment.actor_learner.min_actors
        if left < needed or any(server.given_up for server in self._rendezvous.members):
            raise RunFailed(
                "Too many workers or servers exceeded max_restarts: see the causes in the run's events.jsonl."
            )
        few = len(self._ready) < needed or any(not server.alive for server in self._rendezvous.members)
        if few and not self._waiting:
            self._note("waiting", f"{len(self._ready)} workers are ready: waiting for restarts of lost processes")
        self._waiting = few
        if few:
            time.sleep(_POLL_S / 10)
        return self._rejoin_needed and not few

    def _rejoin(self) -> None:
        for _ in range(_TRIES):
            self._end_turns()
            state = self._joined_state()
            ready = [worker for worker in self._workers if worker in self._ready]
            if ready and self._rendezvous.gather(ready, self._addresses, state):
                self._joined = [worker for worker in ready if worker in self._ready]
                self._rejoin_needed = False
                return
            if any(not member.alive for member in self._rendezvous.members) or not self._ready:
                return  # it has to be restarted first
        raise RunFailed(f"The workers could not connect to each other in {_TRIES} tries: set --actors 1.")

    def _end_turns(self) -> None:
        self._collect([worker for worker in self._joined if worker.calls], wait_for_all=True)

    def _joined_state(self) -> Value:
        """The workers' combined state, or the last known one if none is left."""
        self._end_turns()
        state = self._rendezvous.state(self._joined) if self._joined else None
        if state is not None:
            load_learner(self.learner, state)
        return to_arrays(self.learner.state_dict())

    def _ask(
        self, members: Sequence[SupervisedRole], method: str, args: Sequence[Sequence[Value]], timeout_s: float
    ) -> dict[SupervisedRole, Value]:
        """Answers of the members that reply in time; the others are marked as lost."""
        for member, own in zip(members, args, strict=True):
            member.call(method, *own)
        return collect(self._runtime, members, timeout_s, self._mark_lost)

    def set_learning_rate(self, value: float | None, group: str | None = None) -> None:
        raise UserError("The learning rate cannot be changed in data_parallel, where workers learn: use topology sync.")

    def eval_policy(self, *, deterministic: bool, seed: int) -> Policy:
        self._pull()
        return super().eval_policy(deterministic=deterministic, seed=seed)

    def snapshot(self) -> PolicySnapshot:
        self._pull()
        return super().snapshot()

    def _pull(self) -> None:
        if self._pulled != self.env_steps:
            self._joined_state()
            self._pulled = self.env_steps

    def metrics(self) -> dict[str, float]:
        latest = list(self._latest.values())
        exchange: dict[str, list[float]] = {}
        for answer in latest:
            for name, value in answer["exchange"].items():
                exchange.setdefault(name, []).append(value)
        # All members of a reduction skip the same updates.
        combine = partial(max, default=0) if self._rendezvous.rejoin_on_loss else sum
        return {
            "learn/version": float(max((answer["version"] for answer in latest), default=0)),
            "learn/skipped": float(combine(answer["skipped"] for answer in latest)),
            **self.learner.learning_rates(self.progress),
            "env/restarts": float(sum(answer["restarts"] for answer in latest)),
            **planning_metrics(answer["simulator_steps"] for answer in latest),
            "workers/alive": float(sum(worker.alive for worker in self._workers)),
            "workers/restarts": float(sum(worker.restarts for worker in self._workers)),
            **{name: float(np.mean(values)) for name, values in exchange.items()},
            **self._rendezvous.metrics(),
        }

    def _describe_threads(self) -> str:
        if not self._runtime.is_local:
            return f"1 CPU of the cluster for each of {self._processes} processes"
        plan = f"torch threads: 1 in each of {self._processes} processes"
        return plan if self._processes <= cores() else f"{plan}, which share {cores()} cores"

    def processes(self) -> list[dict[str, Any]]:
        return [member.status() for member in (*self._workers, *self._rendezvous.members)]

    def state_dict(self, *, replay: bool = True, envs: bool = True) -> dict[str, Any]:
        """The workers' learned state and counters, without environments and replay buffers."""
        self._pull()
        return {
            "env_steps": self.env_steps,
            "learner": self.learner.state_dict(),
            "episodes": self.episodes.state_dict(),
            "returns": self._returns.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Resume; every environment starts a new episode."""
        self.env_steps = self._pulled = state["env_steps"]
        self.learner.load_state_dict(state["learner"])
        self.episodes.load_state_dict(state["episodes"])
        self._returns.load_state_dict(state["returns"])
        self._ask(self._workers, "resume_at", [[self.env_steps]] * len(self._workers), ANSWER_S)
        return list(range(self.experiment.num_envs))

    def close(self) -> None:
        self._runtime.close()
