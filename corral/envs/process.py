"""Environments in worker processes, several in each, with observations and actions in shared memory.

A step costs the parent one small message to each worker and one from it; both sides sleep in between. While
the caller decides for some environments, the workers step the others.

When a worker is lost, each of its environments ends its episode with one faulty row (see `losses`).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from corral.envs import channel as ch
from corral.envs.build import EnvFactory, require_same_spaces
from corral.envs.contract import VecEnv
from corral.envs.flight import Flight
from corral.envs.id_set import IdSet
from corral.envs.losses import Losses
from corral.envs.rows import Rows
from corral.envs.sentry import Sentry
from corral.envs.supervise import IDLE as NO_ENV
from corral.envs.supervise import Fault, FaultLog, Supervision
from corral.envs.worker_handle import WorkerHandle, plug_stdio, shared_memory, stop_workers
from corral.errors import EnvFailed, UserError
from corral.types import Array, EnvSpec, StepBatch, Tree

_CHECK_EVERY_S = 0.25


class ProcessVecEnv(VecEnv):
    """VecEnv over worker processes."""

    pipelined = True
    _rows: Rows
    _flight: Flight

    def __init__(
        self,
        factories: Sequence[EnvFactory],
        name: str,
        supervision: Supervision,
        workers: int,
        role: str = "train",
    ):
        self.num_envs, self._name, self._role, self._seed = len(factories), name, role, 0
        self._supervision, self._log = supervision, FaultLog(supervision)
        plug_stdio()
        self._memory_fd = shared_memory("corral-rows")
        self._workers: list[WorkerHandle] = []
        self._sentry = Sentry()
        self._poll = select.poll()
        self._by_fd: dict[int, WorkerHandle] = {}
        self._last_check = time.monotonic()
        # Lives without self, so that an unclosed VecEnv takes its workers along when collected or at exit.
        self._stop = weakref.finalize(self, stop_workers, self._workers, self._sentry, self._memory_fd, os.getpid())
        # Round robin: each half of the environments is then spread over all workers.
        self._worker_of = np.arange(self.num_envs) % workers
        self._specs: dict[int, EnvSpec] = {}
        self._allocated = False
        self._recording = False
        self._asked: set[int] = set()  # indices of workers that owe an answer
        self._answers: dict[int, Any] = {}
        try:
            for index in range(workers):
                ids = np.flatnonzero(self._worker_of == index)
                job = _pickle_factories({i: factories[i] for i in ids.tolist()}, name)
                self._workers.append(WorkerHandle(index, ids, self._memory_fd, job, self._sentry))
                self._watch(self._workers[-1])
            while len(self._specs) < workers:
                self._pump()
            self._allocate()
        except BaseException:
            self._stop()
            raise
        self._last_sent: WorkerHandle | None = None

    @property
    def faults(self) -> Iterable[Fault]:
        """The most recent failures of environments."""
        return tuple(self._log.recent)

    @property
    def restarts(self) -> int:
        """How many times an environment was restarted."""
        return self._log.restarts

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers; environment `i` lives in worker `i % len(worker_pids)`."""
        return [worker.process.pid for worker in self._workers]

    def reset(self, seed: int = 0) -> None:
        """Start new seeded episodes everywhere, after the steps still under way are done."""
        flight = self._flight
        flight.require_open()
        while any(worker.running and worker.pending for worker in self._workers):
            self._guarded_pump()
        lenient = flight.started  # the very first reset that fails is the user's mistake, a later one a fault
        self._seed = seed
        flight.start()
        self._losses.clear()
        self._rows.flip(flight.everyone)
        self._rows.episode[:] = 0
        for worker in self._workers:
            if worker.running:
                self._send_reset(worker, worker.ids, lenient=lenient, whole=True)
            else:
                self._losses.owe_reset(worker.ids)

    def send(self, env_ids: Array, actions: Tree) -> None:
        """Hand one action to each of these idle environments."""
        flight, rows = self._flight, self._rows
        chosen, leaves = flight.take_off(env_ids, actions)
        try:
            for row, leaf in zip(rows.action, leaves, strict=True):
                row[chosen.index] = leaf
            if self._losses.owing:
                alive = self._losses.settle(chosen.ids)
                if not len(alive):
                    return
                chosen = flight.sets.of(alive)
            rows.flip(chosen)
            for worker, frame, count in chosen.route or self._route(chosen):
                if worker.pending == 0:
                    worker.touch()
                worker.pending += count
                with contextlib.suppress(ch.Closed):  # found dead, and replaced, by the next recv
                    worker.channel.send_frame(frame)
                self._last_sent = worker
        except BaseException:  # Ctrl-C in the middle would leave rows that nobody works on
            self.close()
            raise

    def recv(self, min_ready: int | None = None, *, env_ids: Array | None = None) -> StepBatch:
        """Wait for results; environments that fail meanwhile are replaced."""
        flight = self._flight
        if not flight.started:
            self.reset(self.seed)
        wanted, count = flight.wanted(min_ready, env_ids)
        everybody = min_ready is None and env_ids is None
        while flight.num_ready(wanted) < count:
            self._guarded_pump(self._last_sent if everybody else None)
        batch = self._rows.collect(flight.land(wanted))
        if self._losses.owing:
            self._send_resets()
        return batch

    def record_episodes(self) -> None:
        """Note what restores the environments, in the workers."""
        self._recording = True
        for worker in self._workers:
            if worker.running:  # another is told when it gets its rows
                with contextlib.suppress(ch.Closed):
                    worker.channel.send(ch.RECORD)

    def state_dict(self) -> dict[str, Any]:
        """Where the environments are, and what leads there; a worker that dies meanwhile leaves its own out."""
        self._flight.require_idle()
        answers = self._ask(ch.SAVE, {worker.index: None for worker in self._workers if worker.running})
        envs = {env_id: state for answer in answers.values() for env_id, state in answer["envs"].items()}
        for env_id in self._losses.unknown():
            envs.pop(str(env_id), None)
        return {
            "identity": self._identity(),
            "seed": self._seed,
            "rows": self._rows.state_dict(self._flight.everyone),
            "envs": envs,
            "workers": {str(index): answer["generators"] for index, answer in answers.items()},
            "faults": self._log.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Repeat what led to the saved state, in the workers; returns the environments where that failed.

        The workers' global generators go on as well, if there are as many workers as there were.
        """
        flight = self._flight
        flight.require_new()
        self._require_identity(state)
        flight.start()
        # All are waiting for a first observation, so those of a worker that dies get one.
        self._losses.clear()
        self._seed, self._recording = state["seed"], True
        self._rows.load_state_dict(state["rows"], flight.everyone)
        self._log.load_state_dict(state["faults"])
        known = state["workers"] if len(state["workers"]) == len(self._workers) else {}
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
        self._ask(ch.LOAD, jobs)
        while flight.in_flight:  # of workers that died
            self._guarded_pump()
        return [i for i in range(self.num_envs) if flight.ready >> i & 1]

    def close(self) -> None:
        """Close the environments and end the workers."""
        self._flight.closed = True
        self._stop()

    # -- messages ------------------------------------------------------------------------------------------

    def _guarded_pump(self, last: WorkerHandle | None = None) -> None:
        try:
            self._pump(last)
        except BaseException:
            self.close()
            raise

    def _ask(self, op: int, jobs: dict[int, Any]) -> dict[int, Any]:
        """Ask workers, by index, something that takes time; the answers of those that live to give one."""
        self._answers.clear()
        self._asked = set(jobs)
        for index, job in jobs.items():
            worker = self._workers[index]
            worker.pending += 1
            worker.touch()
            with contextlib.suppress(ch.Closed):  # found dead, and replaced, by the pump
                worker.channel.send_json(op, job)
        while self._asked:
            self._guarded_pump()
        return self._answers.copy()

    def _note_loaded(self, worker: WorkerHandle, restarted: list[int]) -> None:
        """A worker's environments are where they were, idle, or have a first observation to deliver."""
        mask = self._flight.sets.of(worker.ids).mask
        self._flight.arrive(sum(1 << env_id for env_id in restarted))
        self._flight.in_flight &= ~mask
        self._losses.fresh &= ~mask

    def _pump(self, last: WorkerHandle | None = None) -> None:
        """Wait for messages, for a bounded time, and act on them; then look for workers that hang.

        A caller that needs everybody's results names the worker to wait for: being woken once instead of
        once per worker saves more than anything else on the way.
        """
        wait_ms = 1000 * min(_CHECK_EVERY_S, self._supervision.step_timeout_s / 4)
        if last is not None and last.pending:
            last.poll.poll(wait_ms)
            wait_ms = 0
        for fd, _ in self._poll.poll(wait_ms):
            worker = self._by_fd[fd]
            try:
                for op, payload in worker.channel.read():
                    self._handle(worker, op, payload)
            except ch.Closed:
                self._replace(worker, "killed")
        now = time.monotonic()
        if now - self._last_check > _CHECK_EVERY_S:
            self._last_check = now
            for worker in self._workers:
                self._check_alive(worker, now)
            self._require_work()

    def _handle(self, worker: WorkerHandle, op: int, payload: bytes) -> None:
        if op == ch.READY:
            done: IdSet | None = self._flight.sets.of_payload(payload)
            assert done is not None
            worker.pending -= len(done)
            worker.touch()
            if self._losses.owing:
                done = self._losses.without(done)
            if done is not None:
                self._flight.arrive(done.mask)
                self._losses.fresh &= ~done.mask
        elif op in (ch.SAVED, ch.LOADED):
            worker.pending -= 1
            self._asked.discard(worker.index)
            self._answers[worker.index] = answer = ch.parse(payload)
            if op == ch.LOADED:
                self._note_loaded(worker, answer)
        elif op == ch.ALIVE:
            worker.touch()
        elif op == ch.FAULT:
            self._log.record(Fault(**json.loads(payload)))
        elif op == ch.SPEC:
            self._specs[worker.index] = EnvSpec.from_json(json.loads(payload))
            if self._allocated:
                self._revive(worker)
        elif op == ch.FAILED:
            failure = json.loads(payload)
            if self._allocated and not worker.running:  # a replacement could not be built; the budget says how often
                self._replace(worker, "raised", failure["text"])
                return
            raise UserError(failure["text"]) if failure["kind"] == "user" else EnvFailed(failure["text"])

    def _route(self, chosen: IdSet) -> list[tuple[WorkerHandle, bytes, int]]:
        """Frames that carry these ids to their workers."""
        owner = self._worker_of[chosen.ids]
        route = []
        for worker in self._workers:
            part = chosen.ids[owner == worker.index]
            if len(part):
                route.append((worker, ch.frame(ch.STEP, self._flight.sets.of(part).payload), len(part)))
        chosen.route = route
        return route

    def _send_reset(self, worker: WorkerHandle, ids: Array, *, lenient: bool, whole: bool = False) -> None:
        worker.pending += len(ids)
        worker.touch()
        # Global generators are seeded when a process starts and by reset(), never in the middle of a run.
        generators = worker.starts if whole or not worker.seeded else None
        worker.seeded = True
        data = {
            "ids": ids.tolist(),
            "seed": self._seed,
            "role": self._role,
            "lenient": lenient,
            "generators": generators,
        }
        with contextlib.suppress(ch.Closed):  # found dead, and replaced, by the next recv
            worker.channel.send_json(ch.RESET, data)

    # -- start and supervision -----------------------------------------------------------------------------

    def _watch(self, worker: WorkerHandle) -> None:
        self._by_fd[worker.channel.fileno()] = worker
        self._poll.register(worker.channel.fileno(), select.POLLIN)

    def _allocate(self) -> None:
        """Agree on the spaces, and give everybody the same rows."""
        self.spec = self._specs[0]
        for worker in self._workers:
            ids = int(self._workers[0].ids[0]), int(worker.ids[0])
            require_same_spaces(self.spec, ids[0], self._specs[worker.index], ids[1])
        size = Rows.nbytes(self.spec, self.num_envs)
        os.ftruncate(self._memory_fd, size)
        self._rows = Rows(self.spec, self.num_envs, mmap.mmap(self._memory_fd, size))
        self._flight = Flight(self.num_envs, self.spec)
        self._losses = Losses(self._rows, self._flight)
        self._allocated = True
        for worker in self._workers:
            self._give_rows(worker)

    def _give_rows(self, worker: WorkerHandle) -> None:
        worker.running = True
        worker.channel.send_json(
            ch.ROWS,
            {
                "spec": self.spec.to_json(),
                "num_envs": self.num_envs,
                "worker": worker.index,
                "record": self._recording,
            },
        )

    def _check_alive(self, worker: WorkerHandle, now: float) -> None:
        if worker.process.poll() is not None:  # its socket may be held open by what it forked
            self._replace(worker, "killed")
            return
        if worker.running:
            if worker.pending == 0:
                return
            mark = int(self._rows.mark[worker.index])
            if mark != worker.last_mark:
                worker.last_mark = mark
                worker.touch()
            limit = self._supervision.step_timeout_s
        else:
            limit = self._supervision.start_timeout_s
        if now - worker.busy_since > limit:
            worker.dump_stacks()
            self._replace(worker, "hung", f"no result for {limit:g} s, so ")

    def _require_work(self) -> None:
        """No unbounded wait: somebody must be working on what is in flight."""
        waited_for = self._allocated and not self._losses.owing and self._flight.in_flight
        if waited_for and not any(worker.pending for worker in self._workers):
            raise EnvFailed("Results are awaited that nobody works on, as after an interrupt in the middle of send().")

    def _replace(self, worker: WorkerHandle, kind: str, why: str = "") -> None:
        """A worker is lost: report it, start another, and note what its environments owe."""
        fd = worker.channel.fileno()
        self._poll.unregister(fd)
        del self._by_fd[fd]
        worker.kill()
        words = why if kind == "raised" else why + worker.last_words()
        if not self._allocated:
            names = ", ".join(map(str, worker.ids.tolist()[:16]))
            raise EnvFailed(f"The worker that builds environments {names} of {self._name} failed: {words}")
        self._asked.discard(worker.index)
        self._report_lost(worker, kind, words)
        if self._flight.started:
            self._losses.note(worker.ids)
        if not worker.running:  # it failed while it replaced another
            time.sleep(0.1)
        worker.release()
        worker.spawn()
        self._watch(worker)

    def _report_lost(self, worker: WorkerHandle, kind: str, words: str) -> None:
        rows = self._rows
        culprit = int(rows.mark[worker.index])
        if culprit == NO_ENV:
            culprit = int(worker.ids[0])
        for env_id in sorted(worker.ids.tolist(), key=lambda i: i != culprit):
            own = env_id == culprit
            stepping = self._flight.in_flight >> env_id & 1
            state = int(rows.seed[env_id]), int(rows.episode[env_id]), int(rows.step[env_id]) + stepping
            self._log.record(
                Fault(env_id, kind if own else "neighbour", *state, words if own else f"environment {culprit}")
            )
        rows.mark[worker.index] = NO_ENV

    def _revive(self, worker: WorkerHandle) -> None:
        """A replacement has built its environments."""
        first = int(worker.ids[0])
        require_same_spaces(self.spec, first, self._specs[worker.index], first)
        try:
            self._give_rows(worker)
        except ch.Closed:
            return  # dead again; the next poll says so
        self._send_resets()

    def _send_resets(self) -> None:
        """Let replaced environments start their next episodes."""
        for worker in self._workers:
            if worker.running:
                ids = self._losses.take_resets(worker.ids)
                if len(ids):
                    self._send_reset(worker, ids, lenient=True)


def _pickle_factories(factories: dict[int, EnvFactory], name: str) -> bytes:
    try:
        data: bytes = cloudpickle.dumps((factories, name))
    except Exception as error:
        raise UserError(
            f"The environment factory of {name} cannot be sent to a worker process ({error}); make it a "
            "module-level function or class, or use backend='local'."
        ) from error
    return data
