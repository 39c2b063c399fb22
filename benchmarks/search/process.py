"""Engines of `python -m benchmarks search` in processes of their own, and tasks of theirs as contestants."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.children import child_env
from benchmarks.common.deadline import TookTooLong
from benchmarks.common.rounds import Slice
from benchmarks.search.task import SearchTask

ANSWER_S = 300.0
"""Longest until an answer; what has to be compiled takes minutes on a busy machine."""
_END_S = 10.0
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


class EngineProcess:
    """One engine, which works only when it is asked."""

    def __init__(self, name: str, problem: Path, python: str = sys.executable):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [python, "-W", "ignore", "-m", "benchmarks.search.engine", name, str(problem.resolve())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            # One thread of BLAS is fastest for small networks.
            env=child_env(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", JAX_PLATFORMS="cpu"),
        )  # fmt: skip
        self._rest = b""

    def ask(self, question: str, **details: Any) -> Any:
        """Ask, and wait for the answer."""
        self.send(question, **details)
        return self.answer()

    def send(self, question: str, **details: Any) -> None:
        """Ask only."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self._process.stdin.write(json.dumps({"ask": question, **details}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the answer to what was asked."""
        assert self._process.stdout is not None
        fd, until = self._process.stdout.fileno(), time.monotonic() + ANSWER_S
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TookTooLong("no answer in time")
            data = os.read(fd, 1 << 20)
            if not data:
                raise self._failure()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Let it end, and end it if it does not."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _failure(self) -> Exception:
        """Why it ended."""
        self._process.wait(_END_S)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["nothing on stderr"]
        missing = next((found for line in reversed(lines) if (found := _MISSING.search(line))), None)
        if missing:
            return ModuleNotFoundError(missing[0], name=missing[1])
        return RuntimeError(lines[-1])


class EngineSearch:
    """A task of one engine, or of the same engine in several processes, as a contestant."""

    def __init__(self, engines: Sequence[EngineProcess], name: str, task: SearchTask):
        self._engines, self._name = engines, name
        self._next = 0
        self.times: list[float] = []
        """Seconds of every decision, all of a batch together."""
        self.work: dict[str, int | None] = {"network_calls": 0, "network_rows": 0, "steps": 0}
        self.decisions = 0
        self.sims = 0
        for engine in engines:
            engine.send("prepare", name=name, task=asdict(task))
        self.prepare_s = max(engine.answer() for engine in engines)

    def run(self, seconds: float) -> Slice:
        """Search one batch of positions after the other."""
        for engine in self._engines:
            engine.send("run", name=self._name, seconds=seconds, start=self._next)
        answers = [engine.answer() for engine in self._engines]
        for answer in answers:
            self._next = answer["next"]
            self.times += answer["times"]
            self.decisions += len(answer["times"])
            self.sims += answer["sims"]
            for key, value in self.work.items():
                self.work[key] = None if value is None or answer[key] is None else value + answer[key]
        return Slice(sum(answer["sims"] for answer in answers), max(answer["seconds"] for answer in answers))

    def close(self) -> None:
        """Its engines are closed by the Lab."""

    def percentile(self, share: float) -> float:
        """Of the seconds of decisions."""
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
