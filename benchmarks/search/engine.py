"""An engine of `python -m benchmarks search` in a separate process, which answers lines of JSON.

`python -m benchmarks.search.engine NAME FILE`. Needs NumPy and the engine's library, and may run in another Python.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.search.task import ROOTS, Array, Problem, SearchTask, load_problem

ENGINES = {
    "corral": "benchmarks.search.corral:CorralEngine",
    "mctx": "benchmarks.search.mctx:Mctx",
    "open_spiel": "benchmarks.search.open_spiel:OpenSpiel",
    "open_spiel_cpp": "benchmarks.search.open_spiel:OpenSpielCpp",
    "lightzero": "benchmarks.search.lightzero:LightZero",
}


@dataclass
class Work:
    """Work of a searcher's searches so far; None where an engine does not report it."""

    network_calls: int | None = 0
    network_rows: int | None = 0
    steps: int | None = 0

    def add(self, network_calls: int, network_rows: int, steps: int) -> None:
        """Count more work of an engine that reports all of it."""
        assert self.network_calls is not None
        assert self.network_rows is not None
        assert self.steps is not None
        self.network_calls += network_calls
        self.network_rows += network_rows
        self.steps += steps


class Searcher(Protocol):
    """A prepared (compiled) task."""

    work: Work

    def decide(self, rows: Array) -> Array:
        """Search these positions, as many as the task has trees; returns the moves."""


class Engine(Protocol):
    """One library's search."""

    version: str
    node_bytes: float | None
    """Memory per node after the first search, if the engine reports it."""

    def __init__(self, problem: Problem): ...

    def perft(self, depth: int) -> list[int]:
        """Perft from the empty board: the number of legal move sequences of each length up to `depth`."""

    def outputs(self) -> Array:
        """Outputs of the network for all positions, [positions, 8]."""

    def prepare(self, task: SearchTask) -> Searcher:
        """Prepare a task."""


def measure(searcher: Searcher, task: SearchTask, seconds: float, start: int) -> dict[str, Any]:
    """Search one batch of positions after the other until the time is over."""
    before = Work(**vars(searcher.work))
    times: list[float] = []
    at, begin = start, time.perf_counter()
    while not times or time.perf_counter() - begin < seconds:
        rows = np.arange(at, at + task.trees) % ROOTS
        then = time.perf_counter()
        searcher.decide(rows)
        times.append(time.perf_counter() - then)
        at = (at + task.trees) % ROOTS
    spent = time.perf_counter() - begin
    now = vars(searcher.work)
    work = {k: None if now[k] is None or v is None else now[k] - v for k, v in vars(before).items()}
    return {"sims": len(times) * task.trees * task.sims, "seconds": spent, "times": times, "next": at, **work}


def main(name: str, file: str) -> None:
    """Answer until stdin is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output of libraries away from the answers
    module, _, member = ENGINES[name].partition(":")
    engine: Engine = getattr(importlib.import_module(module), member)(load_problem(Path(file)))
    searchers: dict[str, tuple[SearchTask, Searcher]] = {}
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = None
        match question.pop("ask"):
            case "perft":
                answer = engine.perft(**question)
            case "outputs":
                answer = np.asarray(engine.outputs(), np.float64).tolist()
            case "prepare":
                task, begin = SearchTask(**question["task"]), time.perf_counter()
                searcher = engine.prepare(task)
                searcher.decide(np.arange(task.trees) % ROOTS)
                searchers[question["name"]] = task, searcher
                answer = time.perf_counter() - begin
            case "moves":
                task, searcher = searchers[question["name"]]
                parts = [searcher.decide(np.arange(at, at + task.trees)) for at in range(0, ROOTS, task.trees)]
                answer = np.concatenate(parts).tolist()
            case "run":
                task, searcher = searchers[question["name"]]
                answer = measure(searcher, task, question["seconds"], question["start"])
            case "counts":
                task, searcher = searchers[question["name"]]
                answer = _corral(engine).counts(searcher, task).tolist()
            case "parts":
                answer = _corral(engine).parts(SearchTask(**question["task"]), question["seconds"])
            case "cpu":
                answer = time.process_time()
            case "facts":
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                answer = {"version": engine.version, "node_bytes": engine.node_bytes, "peak_rss": peak}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _corral(engine: Any) -> Any:
    """The engine, for requests that only Corral's engine answers."""
    return engine


if __name__ == "__main__":
    main(*sys.argv[1:])
