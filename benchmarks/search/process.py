"""Engines of `python -m benchmarks search` in separate processes, and their tasks as contestants."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.children import ChildProcess, child_env
from benchmarks.common.rounds import Slice
from benchmarks.search.task import SearchTask

ANSWER_S = 300.0
"""Timeout of an answer; compiling takes minutes on a busy machine."""
_END_S = 10.0


class EngineProcess(ChildProcess):
    """One engine, which is idle between requests."""

    def __init__(self, name: str, problem: Path, python: str = sys.executable):
        super().__init__(
            [python, "-W", "ignore", "-m", "benchmarks.search.engine", name, str(problem.resolve())], _END_S,
            # One BLAS thread is fastest for small networks.
            env=child_env(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", JAX_PLATFORMS="cpu"),
        )  # fmt: skip

    def ask(self, question: str, **details: Any) -> Any:
        """Send a request and wait for the answer."""
        self.send(question, **details)
        return self.answer()

    def send(self, question: str, **details: Any) -> None:
        self.write_line(json.dumps({"ask": question, **details}))

    def answer(self) -> Any:
        """Wait for the answer to the last request."""
        return json.loads(self.read_line(ANSWER_S))


class EngineSearch:
    """A task of one engine, in one process or several, as a contestant."""

    def __init__(self, engines: Sequence[EngineProcess], name: str, task: SearchTask):
        self._engines, self._name = engines, name
        self._next = 0
        self.times: list[float] = []
        """Seconds of every decision; a decision covers a whole batch of positions."""
        self.work: dict[str, int | None] = {"network_calls": 0, "network_rows": 0, "steps": 0}
        self.decisions = 0
        self.sims = 0
        for engine in engines:
            engine.send("prepare", name=name, task=asdict(task))
        for engine in engines:
            engine.answer()

    def run(self, seconds: float) -> Slice:
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
        """Nothing to do: the Lab closes the engines."""

    def percentile(self, share: float) -> float:
        """Percentile of the seconds per decision."""
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
