"""Actor processes send fragments to one learner (IMPALA, APPO, Ape-X; on-policy algorithms use lag 0).

With `central_inference` there is one actor, for the environments of all workers.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from corral.acting.episode_stats import Episode, EpisodeStats
from corral.config.experiment import Experiment
from corral.core.encoding import Value, arrays_bytes
from corral.core.errors import RunFailed, UserError
from corral.core.machine import cores
from corral.core.types import EnvSpec, LossOutput, Sample, Trajectory
from corral.data.pack import unpack
from corral.data.store import Store, StoreContext
from corral.envs.backends.simulators.options import is_url
from corral.learn.exchange.all_reduce import AllReduce
from corral.learn.threads import ThreadAdapter
from corral.nets.network import has_image_encoder
from corral.runtimes.base import RoleLost, make_runtime, require_room
from corral.runtimes.supervised_role import SupervisedRole, collect
from corral.topologies.actor import Actor
from corral.topologies.base import (
    Note,
    OnRollout,
    StoppedWaiting,
    Topology,
    choose_runtime,
    planning_metrics,
    role_factory,
    start_limit_s,
)
from corral.topologies.learner_group import LearnerGroup
from corral.topologies.replay_shards import ShardedStore
from corral.topologies.shared_returns import LearnerReturns
from corral.topologies.weight_channel import WeightChannel, weights_mode

_MAX_IN_FLIGHT_BYTES = 256e6  # of fragments that actors are sampling or sending
_PAUSE_S = 0.001  # after a turn without any event
_TURN_S = 0.5  # a turn without a fragment ends after this
_LEARN_S = 0.5  # a turn that still has batches to learn from ends after this
_STUCK_S = 600.0  # without a fragment from any actor


class ActorLearner(Topology):
    """One learner, and actors that are never more than two fragments ahead.

    With `weight_sync=sync`, acting and learning alternate and fragments are used in actor order; with one actor a run
    equals one of the topology `sync` bit for bit. Otherwise fragments are used as they arrive, and sequences staler
    than the algorithm's `max_lag` are dropped and counted.
    """

    def __init__(self, experiment: Experiment, note: Note, on_rollout: OnRollout = lambda trajectory: None):
        super().__init__(experiment, note, on_rollout)
        central = experiment.topology == "central_inference"
        names = ["inference"] if central else [f"actor {k}" for k in range(experiment.num_actors)]
        roles = names + [f"replay {k}" for k in range(experiment.actor_learner.replay_shards)]
        roles += [f"learner {k}" for k in range(1, experiment.actor_learner.learners)]
        # With central inference the environments' workers belong to the inference process.
        extra_processes = experiment.num_actors if central and not is_url(experiment.env) else 0
        named = ", ".join(roles[:3]) + (", ..." if len(roles) > 3 else "")
        workers = f" and {extra_processes} workers" if extra_processes else ""
        what = f"A run of {len(roles):,} processes ({named}){workers}"
        name = choose_runtime(experiment)
        require_room(name, len(roles) + extra_processes, what)
        self._runtime = make_runtime(name, experiment.actor_learner.silence_timeout_s)
        self._others = len(roles) + extra_processes if self._runtime.is_local else 0
        try:
            self._runtime.reserve(len(roles), what, extra_processes)
            self._build(names)
        except BaseException:
            self.close()
            raise

    def _build(self, names: list[str]) -> None:
        experiment = self.experiment
        limit = experiment.actor_learner.max_restarts
        self._actors = [
            SupervisedRole(self._runtime, name, role_factory(Actor, experiment, k), self._note, limit)
            for k, name in enumerate(names)
        ]
        exchange = AllReduce() if experiment.actor_learner.learners > 1 else None
        self._build_learner(self._describe(), self._others, None if exchange is None else lambda *_: exchange)
        self._learner_group = None
        self.thread_plan = self._describe_threads()
        adapts = experiment.torch_threads is None and has_image_encoder(self.model)
        self._adapter = ThreadAdapter(self.threads) if adapts else None
        if exchange is not None:
            self._check_shares()
            self._learner_group = LearnerGroup(
                self.learner, exchange, self.precision, experiment, self.spec, self._runtime, self._note
            )
        self._mode = weights_mode(experiment, self.algo.data.max_lag)
        self._channel = WeightChannel(self.learner, self._runtime, experiment.actor_learner.weight_lag)
        self.episodes = EpisodeStats(experiment.num_envs)
        self._ahead = 1 if self._mode == "sync" else 2
        self._env_restarts: dict[str, int] = {}
        self._scales: dict[str, float] = {}  # of rewards, where they are normalised; one per actor
        self._learning_scales: dict[str, float] = {}
        self._returns = LearnerReturns()
        self._simulator_steps: dict[str, int | None] = {}
        self._lag_max = self._stale = 0
        self._fragment_bytes = 0
        self._last_fragment_s = self._turn_end_s = time.monotonic()
        self._waiting = False

    def _make_store(self) -> Store:
        experiment, data = self.experiment, self.algo.data
        shards = experiment.actor_learner.replay_shards
        if not shards:
            return super()._make_store()
        if data.reuse != "replay":
            raise UserError(f"{experiment.algo} has no replay buffer to split into shards: set replay_shards=0.")
        return ShardedStore(
            self._runtime, self.spec, data, experiment.num_envs, shards, experiment.seed,
            experiment.actor_learner.max_restarts, self._note,
        )  # fmt: skip

    def _check_shares(self) -> None:
        size, learners = self.algo.data.batch_size, self.experiment.actor_learner.learners
        if size % learners:
            raise UserError(
                f"A batch of {size} cannot be split evenly among {learners} learners: set a batch_size (num_envs for "
                f"algorithms without one) that is a multiple of {learners}."
            )

    def _describe(self) -> EnvSpec:
        """Wait until all actors have started; returns the specification of their environments."""
        until = time.monotonic() + start_limit_s(self.experiment)
        for actor in self._actors:
            actor.call("describe")
        described: Value = None
        for actor in self._actors:
            while True:
                if not actor.calls and actor.restart_if_due():
                    actor.call("describe")
                if actor.given_up or time.monotonic() > until:
                    raise RunFailed(f"{actor.name} did not start: see its output above, or use topology=sync.")
                if actor.calls and self._runtime.wait([actor.calls[0]], _TURN_S):
                    try:
                        described = actor.calls.popleft().result()
                        break
                    except RoleLost as lost:
                        actor.mark_lost(str(lost))
        return EnvSpec.from_json(described)

    def advance(self) -> dict[str, list[float]]:
        self._last_fragment_s += time.monotonic() - self._turn_end_s  # an evaluation in between is no wait for actors
        metrics = self._advance()
        self._turn_end_s = time.monotonic()
        return metrics

    def _advance(self) -> dict[str, list[float]]:
        self._request_fragments()
        before = self.env_steps
        if self.store.room():
            for traj, priorities in self._in_order() if self._mode == "sync" else self._first_ready():
                self.env_steps += int(traj.faulty.size - traj.faulty.sum())
                self._on_rollout(traj)
                self.learner.observe(traj)
                scale = float(np.mean([*self._scales.values()]))
                self.store.put(traj, priorities, StoreContext(self.progress, scale))
        metrics: dict[str, list[float]] = {}
        until = time.monotonic() + _LEARN_S
        while self._ready():
            self._learn(self.store.get(), metrics)
            if self._mode != "sync" and time.monotonic() > until:
                break
        if self.env_steps == before and not metrics:
            time.sleep(_PAUSE_S)
        return metrics

    def _request_fragments(self) -> None:
        for actor in self._actors:
            self._request(actor)
        alive, total = sum(actor.alive for actor in self._actors), len(self._actors)
        needed = total if self._mode == "sync" else min(self.experiment.actor_learner.min_actors, total)
        if sum(not actor.given_up for actor in self._actors) < needed:
            raise RunFailed(
                f"Too many actors exceeded max_restarts: {alive} are running and {needed} are required; the run's "
                "events.jsonl lists the causes."
            )
        if alive < needed and not self._waiting:
            self._note("waiting", f"{alive} actors are alive and {needed} are needed: waiting for restarts")
        self._waiting = alive < needed

    def _request(self, actor: SupervisedRole) -> None:
        """Restart an actor if that is due, and request as many fragments as it may have in flight."""
        if actor.restart_if_due():
            self._channel.forget(actor)
            self._returns.forget(actor.name)
        while actor.alive and len(actor.calls) < self._ahead and self._within_budget():
            self._channel.offer(actor)
            least = self.learner.version if self._mode == "sync" else 0
            actor.call("sample", least, self.progress, self._returns.for_actor(actor.name))

    def _within_budget(self) -> bool:
        """Whether one more fragment may be in flight; one always may."""
        in_flight = self._in_flight()
        return in_flight == 0 or (in_flight + 1) * self._fragment_bytes <= _MAX_IN_FLIGHT_BYTES

    def _in_flight(self) -> int:
        return sum(len(actor.calls) for actor in self._actors)

    def _in_order(self) -> list[tuple[Trajectory, Any]]:
        taken = []
        self.awaits_envs = True
        try:
            for actor in self._actors:
                while True:
                    fragment = self._take(actor, _TURN_S)
                    if fragment is not None:
                        taken.append(fragment)
                        break
                    if actor.given_up:
                        raise RunFailed(f"{actor.name} crashed too often, and weight_sync=sync needs all actors.")
                    self._request(actor)  # again, if it crashed
        except KeyboardInterrupt as stop:
            raise StoppedWaiting from stop
        finally:
            self.awaits_envs = False
        return taken

    def _first_ready(self) -> list[tuple[Trajectory, Any]]:
        """Fragments that have arrived; waits only if there is nothing to learn from."""
        busy = [actor for actor in self._actors if actor.calls]
        if self._waiting or not busy:
            time.sleep(_TURN_S / 10)
            return []
        self._runtime.wait([actor.calls[0] for actor in busy], 0.0 if self._ready() else _TURN_S)
        fragments = [self._take(actor, 0.0) for actor in busy]
        return [fragment for fragment in fragments if fragment is not None]

    def _take(self, actor: SupervisedRole, timeout_s: float) -> tuple[Trajectory, Any] | None:
        """The fragment requested from an actor; None if it has not arrived, or the actor crashed."""
        if not actor.calls:
            time.sleep(timeout_s / 10)
            return None
        if not self._runtime.wait([actor.calls[0]], timeout_s):
            limit = max(_STUCK_S, start_limit_s(self.experiment))
            if time.monotonic() - self._last_fragment_s > limit:
                raise RunFailed(f"No actor sent data for {limit:.0f} s: check the environments of {actor.name}.")
            return None
        try:
            answer = actor.calls.popleft().result()
        except RoleLost as lost:
            actor.mark_lost(str(lost))
            for scales in (self._scales, self._learning_scales):  # it may never come back
                scales.pop(actor.name, None)
            return None
        self._last_fragment_s = time.monotonic()
        self._env_restarts[actor.name], self._scales[actor.name] = answer["restarts"], answer["reward_scale"]
        self.shows_masks = self.shows_masks or answer["shows_masks"]
        for text in answer["faults"]:
            self._note("fault", f"{actor.name}: {text}")
        self._learning_scales[actor.name] = answer["learning_scale"]
        self._returns.take(actor.name, answer["returns"])
        self._simulator_steps[actor.name] = answer["simulator_steps"]
        for env_id, total, length in answer["episodes"]:
            self.episodes.finished += 1
            self.episodes.recent.append(Episode(env_id, total, length))
        self._fragment_bytes = arrays_bytes(answer["traj"])
        return unpack(answer["traj"], self.spec), answer["priorities"]

    def _ready(self) -> bool:
        bound = self.algo.data.max_lag
        if bound is not None:
            self._stale += self.store.drop_older(self.learner.version - bound)
        return self.store.ready()

    def _learn(self, sample: Sample, metrics: dict[str, list[float]]) -> None:
        if isinstance(sample.batch, Trajectory):
            data = self.algo.data
            new = data.batch_size - round(data.replayed * data.batch_size)  # replayed sequences are always old
            lag = self.learner.version - np.asarray(sample.batch.version)[:new]
            metrics.setdefault("lag/mean", []).append(float(np.mean(lag)))
            self._lag_max = max(self._lag_max, int(np.max(lag)))
        super()._learn(sample, metrics)
        if self._adapter is not None:
            if text := self._adapter.update():
                self._note("threads", text)
            self.threads = self._adapter.number

    def set_learning_rate(self, value: float | None, group: str | None = None) -> None:
        if self._learner_group is not None:
            raise UserError("The learning rate cannot be changed with several learners: set learners=1.")
        super().set_learning_rate(value, group)

    def _step(self, sample: Sample) -> list[LossOutput]:
        if self._learner_group is None:
            return super()._step(sample)
        return self._learner_group.step(sample, self.progress, self.reward_scale or 1.0)

    @property
    def reward_scale(self) -> float | None:
        """Scale of the rewards used for learning relative to the unscaled ones, averaged over the actors."""
        scales = list(self._learning_scales.values())
        if not scales and self._returns.all.count:  # resumed, and no fragment has arrived yet
            return 1.0 / float(self._returns.all.std)
        return float(np.mean(scales)) if scales else super().reward_scale

    def metrics(self) -> dict[str, float]:
        lags = {"lag/max": float(self._lag_max), "lag/dropped": float(self._stale)}
        return {
            **super().metrics(),
            "env/restarts": float(sum(self._env_restarts.values())),
            **planning_metrics(self._simulator_steps.values()),
            "actors/alive": float(sum(actor.alive for actor in self._actors)),
            "actors/restarts": float(sum(actor.restarts for actor in self._actors)),
            "actors/in_flight_mb": self._in_flight() * self._fragment_bytes / 1e6,
            **({} if self.algo.data.reuse == "replay" else lags),
            "weights/sends": float(self._channel.sends),
            "learn/threads": float(self.threads),
            **({} if self._learner_group is None else self._learner_group.metrics()),
        }

    def _describe_threads(self) -> str:
        """One thread per process; the remaining cores for a learner that can use them."""
        if not self._runtime.is_local:
            return f"torch threads: {self.threads} in the learner; 1 CPU of the cluster for each other process"
        total, have = self.threads + self._others, cores()
        plan = f"torch threads: {self.threads} in the learner, 1 in each of {self._others} other processes"
        return plan if total <= have else f"{plan}; {total} threads share {have} cores, try fewer actors"

    def processes(self) -> list[dict[str, Any]]:
        versions = {actor: self._channel.version(actor) for actor in self._actors}
        actors = [actor.status() | {"lag": self.learner.version - versions[actor]} for actor in self._actors]
        learners = self._learner_group.members if self._learner_group is not None else []
        return actors + [member.status() for member in (*getattr(self.store, "members", []), *learners)]

    def state_dict(self, *, replay: bool = True, envs: bool = True) -> dict[str, Any]:
        """Learner, replay buffer and counters, without environments and fragments in flight."""
        return {
            "env_steps": self.env_steps,
            "learner": self.learner.state_dict(),
            "episodes": self.episodes.state_dict(),
            "returns": self._returns.all.state_dict(),
            "store": self.store.state_dict() if replay and self.algo.data.reuse == "replay" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Resume; every environment starts a new episode."""
        self.env_steps = state["env_steps"]
        self.learner.load_state_dict(state["learner"])
        if self._learner_group is not None:
            self._learner_group.disband()
        self.episodes.load_state_dict(state["episodes"])
        if "returns" in state:  # missing in checkpoints of earlier versions
            self._returns.all.load_state_dict(state["returns"])
        if state["store"] is not None:
            self.store.load_state_dict(state["store"])
        for actor in self._actors:
            actor.call("resume_at", self.env_steps)
        collect(self._runtime, self._actors, start_limit_s(self.experiment), SupervisedRole.mark_lost)
        return list(range(self.experiment.num_envs))

    def close(self) -> None:
        self._runtime.close()
