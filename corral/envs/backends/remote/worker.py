"""How a worker handles messages: some environments, stepped on request, results in its rows."""

from __future__ import annotations

import gc
import random
import time
import traceback
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any

import numpy as np

from corral.core import seeding
from corral.core.errors import EnvFailed, EnvNotStarted, UserError
from corral.core.types import EnvSpec
from corral.envs.backends.remote import messages as msg
from corral.envs.backends.remote.pickled import dump, dump_error, load
from corral.envs.stepping.group import EnvGroup
from corral.envs.stepping.id_set import IdSet, IdSets
from corral.envs.stepping.row_infos import RowInfos
from corral.envs.stepping.rows import EnvRows
from corral.envs.supervision import IDLE
from corral.snapshot.rng import read_global_generators, read_space_rngs, write_global_generators


class EnvWorker(ABC):
    """The environments of one worker; the backend defines the transport and where the rows are."""

    _group: EnvGroup
    _rows: EnvRows
    _sets: IdSets
    _last_heartbeat = 0.0

    @abstractmethod
    def post(self, op: int, data: Any) -> None: ...

    @abstractmethod
    def announce(self, done: IdSet) -> None:
        """Report that results of these environments are in their rows."""

    @abstractmethod
    def make_rows(self, spec: EnvSpec, num_envs: int) -> EnvRows: ...

    def visible_mark(self, rows: EnvRows) -> Any:
        """Memory for the id of the environment that is being stepped, visible to the parent."""
        return memoryview(rows.mark.data)[self._index : self._index + 1]

    def start(self, job: bytes) -> None:
        factories, name = load(job)
        report = lambda fault: self.post(msg.FAULT, asdict(fault))  # noqa: E731
        self._group = EnvGroup(factories, name, report, [IDLE], faults=(BaseException,))
        spec = self._group.build(lambda: self.post(msg.ALIVE, None))
        self.post(msg.SPEC, {**spec.to_json(), "space_rngs": read_space_rngs(spec)})

    def step(self, chosen: IdSet) -> None:
        self._group.step(chosen, self.announce)

    def handle(self, op: int, data: Any) -> None:
        if op == msg.RESET:
            self._reset(data)
        elif op == msg.ROWS:
            self._attach(data)
        elif op == msg.RECORD:
            self._group.record()
        elif op == msg.SAVE:
            self.post(msg.SAVED, {"envs": self._group.save(), "generators": read_global_generators()})
        elif op == msg.LOAD:
            self._load(data)
        elif op == msg.APPLY:
            self.post(msg.APPLIED, self._apply(data))
        elif op == msg.KEEP_INFOS:
            self._rows.infos = RowInfos(data)

    def close(self) -> None:
        if hasattr(self, "_group"):  # not if its factories could not be loaded
            self._group.close()

    def _attach(self, data: dict[str, Any]) -> None:
        self._rows = self.make_rows(EnvSpec.from_json(data["spec"]), data["num_envs"])
        self._index = data["worker"]
        self._sets = IdSets(self._rows.num_envs)
        self._group.attach(self._rows, self._sets, self.visible_mark(self._rows))
        if data["record"]:
            self._group.record()
        if data["infos"]:
            self._rows.infos = RowInfos(data["infos"])
        # Everything built so far lives as long as the worker; collections need not look at it.
        gc.collect()
        gc.freeze()

    def _reset(self, data: dict[str, Any]) -> None:
        if data["generators"] is not None:
            self._seed_generators(data["seed"], data["role"], data["generators"])
        chosen = self._sets.of(np.array(data["ids"]))
        self._rows.episode[chosen.ids] = data["episode"]
        if data["begin"] is None:
            self._group.reset(chosen.ids, data["seed"], data["role"], lenient=data["lenient"])
        else:
            self._group.begin(chosen.numbers, *load(data["begin"]))
        self.announce(chosen)

    def _apply(self, data: dict[str, Any]) -> dict[str, Any]:
        try:
            function, values = load(data["call"])
            results = [function(self._group.envs[i], value) for i, value in zip(data["ids"], values, strict=True)]
            return {"results": dump(results, "a result")}
        except Exception as error:
            return failure(error)

    def _load(self, data: dict[str, Any]) -> None:
        self._seed_generators(data["seed"], data["role"], data["start"])
        restarted = self._group.load(data["envs"], data["seed"], data["role"], self._send_heartbeat)
        if data["generators"] is not None:
            write_global_generators(data["generators"])
        self.post(msg.LOADED, restarted)

    def _send_heartbeat(self) -> None:
        """Once a second: replaying an episode may take longer than a step is allowed to."""
        now = time.monotonic()
        if now - self._last_heartbeat > 1.0:
            self._last_heartbeat = now
            self.post(msg.ALIVE, None)

    def _seed_generators(self, run_seed: int, role: str, start: int) -> None:
        seed = seeding.worker_seed(run_seed, role, self._index, start)
        random.seed(seed)
        np.random.seed(seed)


def failure(error: BaseException) -> dict[str, Any]:
    """The contents of FAILED, and of APPLIED if the call failed."""
    expected = isinstance(error, (UserError, EnvFailed))
    text = str(error) if expected else "".join(traceback.format_exception(error))
    kinds = (("start", EnvNotStarted), ("user", UserError), ("failed", BaseException))
    kind = next(kind for kind, cls in kinds if isinstance(error, cls))
    origin = error.__cause__ if kind == "start" and error.__cause__ is not None else error  # pickling drops the cause
    return {"kind": kind, "text": text, "error": dump_error(origin)}
