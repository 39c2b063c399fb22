"""Environments on machines that dial in: this side listens, workers come, step, and may go and come back.

A step costs a message to each worker and its answers, which bring the rows. A worker that is lost leaves its place,
and its environments wait for another to dial in, while the others go on.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from corral.core.errors import EnvFailed, UserError
from corral.core.types import Array, EnvSpec
from corral.envs import grpc_wire as wire
from corral.envs.backends.ray.vec_env import CopiedRowsVecEnv
from corral.envs.backends.remote import messages as ch
from corral.envs.backends.remote.handle import RemoteWorker
from corral.envs.grpc_door import JOINED, LOST, Door, Link
from corral.envs.grpc_text import EnvText
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.rows import CopiedRows, pack, unpack
from corral.envs.supervision import IDLE as NO_ENV
from corral.envs.supervision import Supervision

log = logging.getLogger("corral.envs")

_SAY_S = 5.0  # a place that is vacant for longer is worth a word
_LOOK_S = 5.0  # for a worker to say what it is doing


class GrpcWorker(RemoteWorker):
    """A place for a worker, and the one that has it."""

    link: Link | None = None
    vacant_since: float | None = None  # until a worker has built what it should
    looked_at: float | None = None  # when it was asked what it is doing
    missed = False  # that nobody came was said
    words = ""

    def __init__(self, index: int, ids: Array, job: dict[str, Any]):
        super().__init__(index, ids)
        self.job = job
        self.mask = sum(1 << env_id for env_id in ids.tolist())

    def vacate(self) -> None:
        """Wait for somebody to dial in."""
        self.link = self.looked_at = None
        if self.vacant_since is None:
            self.vacant_since, self.missed = time.monotonic(), False
        self.reset()

    def post(self, op: int, data: Any = None) -> None:
        """Send a message."""
        if self.link is not None:
            self.link.send(op, data)

    def exit_report(self) -> str:
        """How it was lost."""
        return self.words


class GrpcVecEnv(CopiedRowsVecEnv[GrpcWorker]):
    """VecEnv over workers that dial in by `corral join`."""

    def __init__(
        self,
        envs: Sequence[EnvText],
        supervision: Supervision,
        workers: int,
        listen: str,
        role: str = "train",
    ):
        if not envs:
            raise UserError("An empty list of environments; pass at least one.")
        name = envs[0].name
        super().__init__(len(envs), name, supervision, workers, role)
        places = []
        for index in range(workers):
            ids = np.flatnonzero(self._worker_of == index)
            texts = [[env_id, dataclasses.astuple(envs[env_id])] for env_id in ids.tolist()]
            places.append(GrpcWorker(index, ids, {"name": name, "envs": texts}))
        self._door = Door(listen, workers, len(envs))
        # Lives without self, so that workers are told when an unclosed VecEnv is collected or at exit.
        self._stop = weakref.finalize(self, Door.close, self._door)
        log.info(
            "%s: listening on %s for %d workers; `corral join HOST:%s` starts one.",
            name, self.address, workers, self.address.rpartition(":")[2],
        )  # fmt: skip
        self._start_all(places)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._door.address

    @property
    def peers(self) -> list[str | None]:
        """Host and process of each worker, None where nobody is; environment `i` is worker `i % len(peers)`'s."""
        return [None if worker.link is None else worker.link.peer for worker in self._workers]

    def _start(self, worker: GrpcWorker) -> None:
        self._specs.pop(worker.index, None)
        worker.vacate()
        self._door.open(worker.index, worker.job)

    def _end(self, worker: GrpcWorker) -> None:
        if worker.link is not None:
            worker.link.end("ABORTED", "the learner gave this worker up")

    # -- messages ------------------------------------------------------------------------------------------

    def _dispatch(self, chosen: IdSet) -> None:
        for worker, mine in self._shares(chosen):
            worker.post(ch.STEP, [self._in_flight.sets.of(mine).payload, [leaf[mine] for leaf in self._rows.action]])

    def _post_load(self, worker: GrpcWorker, job: Any) -> None:
        for part in wire.parts(self.spec, worker.ids):
            worker.post(wire.PARCEL, pack(self._rows, self._in_flight.sets.of(part)))
        worker.post(ch.LOAD, job)

    def _receive(self, last: GrpcWorker | None, wait_s: float) -> None:
        try:
            item = self._door.inbox.get(timeout=wait_s)
            while True:
                self._take(*item)
                item = self._door.inbox.get_nowait()
        except queue.Empty:
            pass

    def _take(self, link: Link, op: int, data: Any) -> None:
        """Act on what a worker says; one that says what makes no sense is given up."""
        try:
            self._act_on(link, op, data)
        except (UserError, EnvFailed):
            raise
        except (TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
            worker = self._workers[link.place]
            if worker.link is not link:
                raise
            self._lose(worker, f"it sent what makes no sense here (message {op}: {error!r})")

    def _act_on(self, link: Link, op: int, data: Any) -> None:
        worker = self._workers[link.place]
        if op == JOINED:
            worker.link = link
            worker.heartbeat()
        elif worker.link is not link:
            return
        elif op == LOST:
            self._lose(worker, data)
        elif op in (ch.READY, wire.PARCEL):
            self._take_rows(worker, op, data)
        elif op == wire.SEEN:
            self._seen(worker, data)
        elif op == ch.SPEC:
            self._take_spec(worker, link, data)
        else:
            if op == ch.FAILED:
                data["text"] = f"The worker on {link.peer}: {data['text']}"
            self._handle(worker, op, data)

    def _take_rows(self, worker: GrpcWorker, op: int, parcel: CopiedRows) -> None:
        try:
            chosen = self._in_flight.sets.of_payload(parcel.env_ids)
            if chosen.mask & ~worker.mask:
                raise ValueError("rows of others' environments")
            unpack(self._rows, chosen, parcel)
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            self._lose(worker, f"it sent rows that do not fit ({error})")
            return
        if op == ch.READY:
            self._ready(worker, chosen)

    def _take_spec(self, worker: GrpcWorker, link: Link, data: Any) -> None:
        """A worker has built its environments; one whose spaces are others is refused."""
        theirs = EnvSpec.from_json(data)
        known = [self.spec] if self._allocated else [
            self._specs[other.index] for other in self._workers
            if other.index in self._specs and other.job["envs"][0][1] == worker.job["envs"][0][1]
        ]  # fmt: skip
        odd = _difference(known[0], theirs) if known else None
        if odd is None:
            worker.vacant_since = None
            log.info("%s: %s has environments %s", self._name, link.peer, _some(worker.ids))
            self._handle(worker, ch.SPEC, data)
            return
        log.warning("the worker on %s was refused: its environments have %s", link.peer, odd)
        link.end("FAILED_PRECONDITION", f"The environments have {odd}: install the same versions of their packages.")
        self._start(worker)

    # -- supervision ---------------------------------------------------------------------------------------

    def _lose(self, worker: GrpcWorker, words: str) -> None:
        peer = "nobody" if worker.link is None else worker.link.peer
        worker.words = f"its worker was on {peer}; {words}"
        if (
            not worker.running
        ):  # it had nothing to lose; how long that may go on is counted from when the place got vacant
            log.warning("environments %s of %s: %s", _some(worker.ids), self._name, worker.words)
            self._end(worker)
            self._start(worker)
            return
        under_way = [env_id for env_id in worker.ids.tolist() if self._in_flight.in_flight >> env_id & 1]
        self._rows.mark[worker.index] = next(iter(under_way), NO_ENV)
        self._replace(worker, "killed")

    def _check_alive(self, worker: GrpcWorker, now: float) -> None:
        if worker.link is None:
            self._check_vacant(worker, now)
            return
        limit = self._overdue(worker, now)
        if limit is None:
            worker.looked_at = None
        elif worker.looked_at is None:
            worker.looked_at = now
            worker.post(wire.LOOK)
        elif now - worker.looked_at > _LOOK_S:
            self._give_up(worker, limit, NO_ENV, f"its worker on {worker.link.peer} did not say where it is")

    def _overdue(self, worker: GrpcWorker, now: float) -> float | None:
        """The deadline that has passed, in seconds, if one has."""
        limit = self._supervision.start_timeout_s
        if worker.running:
            if worker.pending == 0:
                return None
            restoring = worker.index in self._asked
            limit = limit * len(worker.ids) if restoring else self._supervision.step_timeout_s
        elif worker.index in self._specs:  # it waits for others to get there
            return None
        return limit if now - worker.busy_since > limit else None

    def _seen(self, worker: GrpcWorker, data: dict[str, Any]) -> None:
        """A worker that is late says what it is doing."""
        worker.looked_at = None
        limit, mark = self._overdue(worker, time.monotonic()), int(data["mark"])
        if limit is None or worker.link is None:
            return
        if worker.pending > 1 and mark != worker.last_mark:  # it is getting on, or this was the first look
            worker.last_mark = mark
            worker.heartbeat()
            return
        self._give_up(
            worker, limit, mark, f"its worker on {worker.link.peer} was given up; its stack:\n{data['stack']}"
        )

    def _give_up(self, worker: GrpcWorker, limit: float, mark: int, words: str) -> None:
        if self._allocated:
            self._rows.mark[worker.index] = mark if worker.mask >> max(0, mark) & 1 and mark != NO_ENV else NO_ENV
        worker.words = words
        self._replace(worker, "hung", f"no result for {limit:g} s, so ")

    def _check_vacant(self, worker: GrpcWorker, now: float) -> None:
        """Say that a place waits for a worker, and how to start one; EnvFailed when nobody comes."""
        waited, limit = now - (worker.vacant_since or now), self._supervision.start_timeout_s
        port = self.address.rpartition(":")[2]
        which = f"Environments {_some(worker.ids)} of {self._name}"
        if waited > limit:
            raise EnvFailed(
                f"{which} have had no worker for {waited:.0f} s: start one by `corral join HOST:{port}`, HOST being "
                "this machine, or raise Supervision.start_timeout_s."
            )
        if waited > _SAY_S and not worker.missed:
            worker.missed = True
            log.warning("%s wait for a worker, for up to %.0f s: `corral join HOST:%s`.", which, limit - waited, port)


def _difference(ours: EnvSpec, theirs: EnvSpec) -> str | None:
    """What keeps two environments from sharing a batch, in words."""
    for what, left, right in (
        ("observation", ours.observation, theirs.observation),
        ("action", ours.action, theirs.action),
    ):
        if left != right:
            return f"{what} space {right.space} instead of {left.space}"
    return None


def _some(ids: Array) -> str:
    text = ", ".join(map(str, ids.tolist()[:16]))
    return f"{text}, ..." if len(ids) > 16 else text
