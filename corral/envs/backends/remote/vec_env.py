"""Environments in remote workers: what all backends share whose workers answer messages.

The backend starts, reaches, waits for and ends a worker; the requests, the handling of their answers, and the
replacement of lost workers are here. The messages are those of `messages`.

When a worker is lost, each of its environments ends its episode with one faulty row (see `pending_faults`).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import cloudpickle
import numpy as np

from corral.core.errors import EnvFailed, EnvNotStarted, UserError
from corral.core.gym_env import EnvFactory, require_same_spaces
from corral.core.types import Array, EnvSpec
from corral.envs.backends.remote import messages as msg
from corral.envs.backends.remote.pickled import dump, load, load_error
from corral.envs.backends.row_vec_env import POLL_S, AsyncVecEnv
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.in_flight import InFlight
from corral.envs.stepping.pending_faults import PendingFaults
from corral.envs.stepping.row_infos import RowInfos
from corral.envs.stepping.rows import EnvRows
from corral.envs.supervision import IDLE, Fault, FaultLog, Supervision, marked_env
from corral.snapshot.rng import write_space_rngs


class RemoteWorker(ABC):
    """One worker and the environments it owns."""

    def __init__(self, index: int, ids: Array):
        self.index, self.ids = index, ids
        self.starts = -1

    def reset(self) -> None:
        """Prepare for a new process in place of the last."""
        self.starts += 1
        self.seeded = False  # its global RNGs
        self.running = False  # it has built its environments and has its rows
        self.pending = 0  # results not yet received
        self.last_mark = IDLE
        self.heartbeat()

    def heartbeat(self) -> None:
        self.busy_since = time.monotonic()

    @abstractmethod
    def spawn(self) -> None:
        """Start the worker, or a replacement; it builds its environments and answers with SPEC."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker, whatever its state, and drop its unread messages."""

    @abstractmethod
    def post(self, op: int, data: Any = None) -> None:
        """Send a message; a dead worker is noticed only while waiting for the answer."""

    @abstractmethod
    def exit_report(self) -> str: ...


W = TypeVar("W", bound=RemoteWorker)


class RemoteVecEnv(AsyncVecEnv, Generic[W]):
    """VecEnv over workers."""

    gives_access = True
    _stop: Callable[[], Any]  # ends all workers; safe to call twice

    def __init__(self, num_envs: int, name: str, supervision: Supervision, workers: int, role: str):
        self.num_envs, self._name, self._role = num_envs, name, role
        self._supervision, self._log = supervision, FaultLog(supervision)
        self._lock = threading.RLock()  # shared with no other thread; cheaper than a nullcontext
        self._workers: list[W] = []
        self._last_check = time.monotonic()
        # Round robin: each half of the environments is then spread over all workers.
        self._worker_of = np.arange(num_envs) % workers
        self._specs: dict[int, EnvSpec] = {}
        self._allocated = False
        self._recording = False
        self._asked: set[int] = set()  # indices of workers with a pending answer
        self._answers: dict[int, Any] = {}
        self._last_sent: W | None = None

    @abstractmethod
    def _receive(self, last: W | None, wait_s: float) -> None:
        """Wait for a bounded time and handle what arrives; `last`: the worker sent to last, to wait for all."""

    @abstractmethod
    def _check_alive(self, worker: W, now: float) -> None:
        """Replace a worker that is gone or hangs."""

    def reset(self, seed: int = 0) -> None:
        in_flight = self._in_flight
        in_flight.require_open()
        while any(worker.running and worker.pending for worker in self._workers):
            self._pump()
        lenient = in_flight.started  # the very first reset that fails is the user's mistake, a later one a fault
        self._seed = seed
        in_flight.start()
        self._pending.clear()
        self._rows.flip(in_flight.all_envs)
        self._rows.episode[:] = 0
        for worker in self._workers:
            if worker.running:
                self._send_reset(worker, worker.ids, lenient=lenient, whole=True)
            else:
                self._pending.schedule_reset(worker.ids)

    def begin_episodes(
        self, env_ids: Array, seeds: int | Sequence[int | None], options: Sequence[Mapping[str, Any] | None]
    ) -> None:
        if not self._in_flight.started:
            self._pending.clear()
        chosen = self._in_flight.begin(env_ids)
        self._finish_restarts()
        self._rows.flip(chosen)
        self._rows.episode[chosen.ids] += 1
        jobs = dict(zip(chosen.numbers, zip(self._each_seed(chosen, seeds), options, strict=True), strict=True))
        for worker in self._workers:
            ids = chosen.ids[self._worker_of[chosen.ids] == worker.index]
            if len(ids):
                begin = dump(tuple(zip(*(jobs[i] for i in ids.tolist()), strict=True)), "an option of reset()")
                self._send_reset(worker, ids, lenient=False, begin=begin)

    def apply(
        self, function: Callable[[Any, Any], Any], values: Iterable[Any] = (), env_ids: Array | None = None
    ) -> list[Any]:
        self._in_flight.require_none_waiting("A call of the environments")
        self._finish_restarts()
        ids = self._in_flight.all_envs.ids if env_ids is None else self._in_flight.sets.of(env_ids).ids
        each = dict(zip(ids.tolist(), list(values) or [None] * len(ids), strict=True))
        jobs = {}
        for worker in self._workers:
            if mine := [i for i in worker.ids.tolist() if i in each]:
                jobs[worker.index] = {"ids": mine, "call": dump((function, [each[i] for i in mine]), "the call")}
        answers = self._ask(msg.APPLY, jobs)
        results: dict[int, Any] = {}
        for index, job in jobs.items():
            if index not in answers:
                raise EnvFailed(
                    f"A worker of {self._name} was lost in a call of its environments, which are restarted."
                )
            if "results" not in answers[index]:
                self._raise(answers[index], original=True)
            results |= zip(job["ids"], load(answers[index]["results"]), strict=True)
        return [results[i] for i in ids.tolist()]

    def keep_infos(self, names: Sequence[str]) -> None:
        self._rows.infos = RowInfos(names)
        for worker in self._workers:
            worker.post(msg.KEEP_INFOS, list(names))  # a replacement is told when it gets its rows

    def record_episodes(self) -> None:
        self._recording = True
        for worker in self._workers:
            if worker.running:  # a replacement is told when it gets its rows
                worker.post(msg.RECORD)

    def state_dict(self) -> dict[str, Any]:
        """State of all environments; those of a worker that dies while saving are omitted."""
        self._in_flight.require_idle()
        answers = self._ask(msg.SAVE, {worker.index: None for worker in self._workers if worker.running})
        envs = {env_id: state for answer in answers.values() for env_id, state in answer["envs"].items()}
        for env_id in self._pending.unknown():
            envs.pop(str(env_id), None)
        workers = {str(index): answer["generators"] for index, answer in answers.items()}
        return super().state_dict() | {"envs": envs, "workers": workers}

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Replay the recorded episodes, with global RNGs if the worker count is the same; returns ids that failed."""
        self._load_rows(state)
        # All wait for a first observation, so the environments of a worker that dies get one.
        self._pending.clear()
        self._recording = True
        known = state.get("workers", {})
        known = known if len(known) == len(self._workers) else {}
        jobs = {}
        for worker in self._workers:
            worker.seeded = True
            jobs[worker.index] = {
                "envs": {str(i): state["envs"][str(i)] for i in worker.ids.tolist() if str(i) in state["envs"]},
                "seed": self._seed,
                "role": self._role,
                "start": worker.starts,
                "generators": known.get(str(worker.index)),
            }
        self._ask(msg.LOAD, jobs)
        while self._in_flight.in_flight:  # of workers that died
            self._pump()
        return [i for i in range(self.num_envs) if self._in_flight.ready >> i & 1]

    def close(self) -> None:
        if self._allocated:
            self._in_flight.closed = True
        self._stop()
        self._log.close()

    def _wait(self, wait_for_all: bool, timeout_s: float) -> None:
        """Handle messages, and from time to time look for workers that hang."""
        self._receive(self._last_sent if wait_for_all else None, min(timeout_s, self._supervision.step_timeout_s / 4))
        now = time.monotonic()
        if now - self._last_check > POLL_S:
            self._last_check = now
            for worker in self._workers:
                self._check_alive(worker, now)
            self._require_work()

    def _ask(self, op: int, jobs: dict[int, Any]) -> dict[int, Any]:
        """Send workers, by index, a slow request; returns the answers of those that survive."""
        self._answers.clear()
        self._asked = set(jobs)
        for index, job in jobs.items():
            worker = self._workers[index]
            worker.pending += 1
            worker.heartbeat()
            self._post(worker, op, job)
        while self._asked:
            self._pump()
        return self._answers.copy()

    def _post(self, worker: W, op: int, job: Any) -> None:
        worker.post(op, job)

    def _start(self, worker: W) -> None:
        worker.spawn()

    def _end(self, worker: W) -> None:
        worker.kill()

    def _make_rows(self) -> EnvRows:
        rows = EnvRows(self.spec, self.num_envs)
        rows.mark[:] = IDLE
        return rows

    def _ready(self, worker: W, results: IdSet) -> None:
        worker.pending -= len(results)
        worker.heartbeat()
        self._pending.complete(results)

    def _handle(self, worker: W, op: int, data: Any) -> None:
        if op in (msg.SAVED, msg.LOADED, msg.APPLIED):
            worker.pending -= 1
            self._asked.discard(worker.index)
            self._answers[worker.index] = data
            if op == msg.LOADED:  # its environments are idle, or have a first observation to deliver
                mask = self._in_flight.sets.of(worker.ids).mask
                self._in_flight.complete(sum(1 << env_id for env_id in data))
                self._in_flight.in_flight &= ~mask
                self._pending.fresh &= ~mask
        elif op == msg.INFOS:
            if self._rows.infos is not None:
                self._rows.infos.put(load(data))
        elif op == msg.ALIVE:
            worker.heartbeat()
        elif op == msg.FAULT:
            self._log.record(Fault(**data))
        elif op == msg.SPEC:
            self._specs[worker.index] = spec = EnvSpec.from_json(data)
            write_space_rngs(spec, data["space_rngs"])
            if self._allocated:
                first = int(worker.ids[0])
                require_same_spaces(self.spec, first, spec, first)
                self._give_rows(worker)
                self._start_due()
        elif op == msg.FAILED:
            if self._allocated and not worker.running:  # a replacement could not be built; the budget limits how often
                self._replace(worker, "raised", data["text"])
                return
            self._raise(data)

    def _raise(self, data: dict[str, Any], *, original: bool = False) -> None:
        """Raise a worker's failure, caused by its own exception, or that exception, if `original`."""
        error = load_error(data["error"])
        if isinstance(error, (UserError, EnvFailed)):
            raise error
        if original and error is not None:
            error.add_note(f"In the process of the environment:\n{data['text']}")
            raise error
        raise {"start": EnvNotStarted, "user": UserError, "failed": EnvFailed}[data["kind"]](data["text"]) from error

    def _finish_restarts(self) -> None:
        """Wait until every worker has built its environments."""
        while not all(worker.running for worker in self._workers):
            self._pump()

    def _send_reset(
        self, worker: W, ids: Array, *, lenient: bool, whole: bool = False, begin: bytes | None = None
    ) -> None:
        worker.pending += len(ids)
        worker.heartbeat()
        # Global RNGs are seeded when a process starts and by reset(), never in the middle of a run.
        generators = worker.starts if whole or not worker.seeded else None
        worker.seeded = True
        data = {
            "ids": ids.tolist(),
            "seed": self._seed,
            "role": self._role,
            "lenient": lenient,
            "generators": generators,
            "episode": self._rows.episode[ids].tolist(),
            "begin": begin,
        }
        worker.post(msg.RESET, data)

    def _jobs(self, factories: Sequence[EnvFactory], workers: int) -> list[tuple[int, Array, bytes]]:
        """For each worker: its index, its environments, and their factories as bytes."""
        ids = [np.flatnonzero(self._worker_of == index) for index in range(workers)]
        mine = [{i: factories[i] for i in each.tolist()} for each in ids]
        try:
            return [(k, each, cloudpickle.dumps((mine[k], self._name))) for k, each in enumerate(ids)]
        except Exception as error:
            raise UserError(
                f"The environment factory of {self._name} cannot be sent to a worker process ({error}); make it a "
                "module-level function or class, or use backend='local'."
            ) from error

    def _start_all(self, workers: Sequence[W]) -> None:
        """Start all workers, check that their spaces agree, and send them their rows."""
        try:
            for worker in workers:
                self._workers.append(worker)
                self._start(worker)
            while len(self._specs) < len(workers):
                self._pump()
            self.spec = self._specs[0]
            for worker in self._workers:
                ids = int(self._workers[0].ids[0]), int(worker.ids[0])
                require_same_spaces(self.spec, ids[0], self._specs[worker.index], ids[1])
            self._rows = self._make_rows()
            self._in_flight = InFlight(self.num_envs, self.spec)
            self._pending = PendingFaults(self._rows, self._in_flight)
            self._allocated = True
            for worker in self._workers:
                self._give_rows(worker)
        except BaseException:
            self._stop()
            raise

    def _give_rows(self, worker: W) -> None:
        worker.running = True
        rows = {"spec": self.spec.to_json(), "num_envs": self.num_envs, "worker": worker.index}
        infos = [] if self._rows.infos is None else list(self._rows.infos.names)
        worker.post(msg.ROWS, {**rows, "record": self._recording, "infos": infos})

    def _require_work(self) -> None:
        """No unbounded wait: some worker must be working on what is in flight."""
        waited_for = self._allocated and not self._pending.any_pending and self._in_flight.in_flight
        if waited_for and not any(worker.pending for worker in self._workers):
            raise EnvFailed("No worker is computing the results in flight: send() was interrupted. Make a new VecEnv.")

    def _replace(self, worker: W, kind: str, why: str = "") -> None:
        """Report a lost worker, start a replacement, and schedule faulty rows and resets for its environments."""
        self._end(worker)
        report = why if kind == "raised" else why + worker.exit_report()
        if not self._allocated:
            names = ", ".join(map(str, worker.ids.tolist()[:16]))
            raise EnvFailed(f"The worker that builds environments {names} of {self._name} failed: {report}")
        self._asked.discard(worker.index)
        culprit = marked_env(int(self._rows.mark[worker.index]))
        self._report_lost(worker.ids, int(worker.ids[0]) if culprit == IDLE else culprit, kind, report)
        self._rows.mark[worker.index] = IDLE
        if self._in_flight.started:
            self._pending.schedule_faults(worker.ids)
        if not worker.running:  # it failed while it replaced another
            time.sleep(0.1)
        self._start(worker)

    def _start_due(self) -> None:
        for worker in self._workers:
            if worker.running:
                ids = self._pending.take_resets(worker.ids)
                if len(ids):
                    self._send_reset(worker, ids, lenient=True)
