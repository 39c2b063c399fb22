"""What `python -m benchmarks search` compares: tree search on Connect Four, with a network and without one.

Every engine searches the same positions with the same network, 100 simulations each; mctx, OpenSpiel and LightZero use
their own trees. Each engine is a separate process, and only one of them works at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.common.facts import CpuTimes
from benchmarks.common.report import LayerRow, Scale, Verdict
from benchmarks.common.rounds import Entry, Outcome, Spread
from benchmarks.search.process import ANSWER_S, EngineProcess, EngineSearch
from benchmarks.search.task import SearchTask

CaseName = Literal["network", "tree"]
CASES: tuple[CaseName, ...] = ("network", "tree")

NEEDS = {
    "mctx": "pip install mctx pgx",
    "open_spiel": "pip install open_spiel",
    "open_spiel_cpp": "pip install open_spiel",
    "lightzero": "pip install --no-deps LightZero",
}
PEERS = tuple(NEEDS)
_TITLES = {"corral": "corral", "mctx": "mctx + pgx", "open_spiel": "OpenSpiel Python",
           "open_spiel_cpp": "OpenSpiel C++", "lightzero": "LightZero mz_tree"}  # fmt: skip
SCALE = Scale("python -m benchmarks search", "simulations per second", "mctx", "microseconds per simulation and part",
              ("network", "simulator", "tree"), "corral")  # fmt: skip
_MEMORY_TARGET, _LATENCY_TARGET_MS = 300.0, 8.0


class Lab:
    """The engines, each started when it is first needed."""

    def __init__(self, problem: Path, peer_python: str = sys.executable):
        self._problem, self._peer_python = problem, peer_python
        self._engines: dict[str, EngineProcess] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def engine(self, name: str, copy: int = 0) -> EngineProcess:
        """The process of an engine; further copies have other numbers."""
        key = f"{name} {copy}"
        if key not in self._engines:
            python = sys.executable if name == "corral" else self._peer_python
            self._engines[key] = EngineProcess(name, self._problem, python)
            self._stack.callback(self._engines[key].close)
        return self._engines[key]

    def facts(self) -> dict[str, Any]:
        """Version, peak memory and bytes per node of every engine that runs."""
        return {key.partition(" ")[0]: facts for key, facts in self._ask_all("facts").items() if key.endswith(" 0")}

    def cpu_times(self) -> CpuTimes | None:
        """CPU times with those of the engines counted as ours, although they have not ended."""
        now = CpuTimes.now()
        return None if now is None else replace(now, ours=now.ours + sum(self._ask_all("cpu").values()))

    def _ask_all(self, question: str) -> dict[str, Any]:
        found = {}
        for key, engine in self._engines.items():
            with suppress(ImportError, RuntimeError):
                found[key] = engine.ask(question)
        return found


def title(engine: str, task: SearchTask, copies: int = 1) -> str:
    """A contestant's name, with trees x leaves."""
    size = f"{task.trees} x {task.leaves}" if engine == "corral" else str(task.trees)
    what = {"network": "", "zero": "", "rollouts": ", random games"}[task.evaluator]
    return f"{_TITLES[engine]}, {size}{what}" + (f", {copies} processes" if copies > 1 else "")


@dataclass(frozen=True)
class SearchCase:
    """One kind of leaf evaluation, with all engines and several numbers of trees."""

    name: CaseName
    sims: int
    lab: Lab
    tasks: Sequence[tuple[str, SearchTask, int]]
    num_envs: int | None = field(default=None, init=False)
    seconds: float = 1.0
    """Seconds for which each row of layers is measured."""
    ideal: float | None = field(default=None, init=False)
    scale: Scale = field(default=SCALE, init=False)
    searching: dict[str, EngineSearch] = field(default_factory=dict, init=False)
    """Contestants by name, with their counts."""

    @property
    def label(self) -> str:
        what = "MLP 84-128-128-(7+1)" if self.name == "network" else "no network"
        return f"Connect Four, {self.sims} simulations, {what}"

    @property
    def entries(self) -> list[Entry]:
        found = []
        for engine, task, copies in self.tasks:
            name = title(engine, task, copies)
            build = partial(self._search, engine, copies, name, task)
            kind: Literal["corral", "peer"] = "corral" if engine == "corral" else "peer"
            found.append(Entry(name, kind, build, NEEDS.get(engine, ""), ANSWER_S))
        return found

    def _search(self, engine: str, copies: int, name: str, task: SearchTask) -> EngineSearch:
        engines = [self.lab.engine(engine, copy) for copy in range(copies)]
        self.searching[name] = EngineSearch(engines, name, task)
        return self.searching[name]

    def base(self, outcome: Outcome) -> str:
        """mctx with its fastest number of trees."""
        return self.best("mctx", outcome) or "mctx"

    def best(self, engine: str, outcome: Outcome) -> str | None:
        """An engine's fastest contestant, if any ran."""
        return outcome.fastest(title(*task) for task in self.tasks if task[0] == engine)

    def layers(self, outcome: Outcome) -> list[LayerRow]:
        """Where Corral's time goes."""
        rows = []
        for engine, task, _ in self.tasks:
            if engine == "corral" and task.evaluator != "rollouts" and task.trees in (1, 64) and task.leaves > 1:
                found = self.lab.engine("corral").ask("parts", task=vars(task), seconds=self.seconds)
                spreads = {part: Spread(micros, micros, micros) for part, micros in found.items()}
                total = sum(found.values())
                rows.append(LayerRow(title(engine, task), spreads, Spread(total, total, total)))
        return rows

    def verdicts(self, outcome: Outcome, layers: Sequence[LayerRow]) -> list[Verdict]:
        """The targets at 100 simulations."""
        if self.sims != 100:
            return []
        evaluator: Literal["network", "zero"] = "network" if self.name == "network" else "zero"
        ours = title("corral", SearchTask(evaluator, 64, 4))
        bound = _bound(ours, layers)
        floor, ratios = (700e3, {"mctx": 8.0, "open_spiel_cpp": 1.0}) if self.name == "tree" else (
            120e3, {"mctx": 2.0, "lightzero": 5.0, "open_spiel": 2.0})  # fmt: skip
        found = [Verdict(self.label, floor, outcome.spread(ours), ours, bound, "simulations per second")]
        for engine, needed in ratios.items():
            if theirs := self.best(engine, outcome):
                target = f"{self.label}, corral over {theirs}"
                found.append(Verdict(target, needed, outcome.ratio(ours, theirs), ours, bound))
        if self.name == "network":
            found += self._of_one_tree(outcome, layers)
        memory = self.lab.engine("corral").ask("facts")["node_bytes"]
        target = "Memory per tree node with its state"
        return [*found, Verdict(target, _MEMORY_TARGET, Spread.of([memory]), ours, "", "bytes", at_most=True)]

    def _of_one_tree(self, outcome: Outcome, layers: Sequence[LayerRow]) -> list[Verdict]:
        many, one, quick = (title("corral", SearchTask("network", *size)) for size in ((64, 4), (1, 4), (1, 8)))
        bound = _bound(quick, layers)
        of = self.searching[quick]
        took = Spread(*(1e3 * of.percentile(share) for share in (0.5, 0.0, 0.95)))
        ratio = outcome.ratio(many, one)
        return [
            Verdict("Time per decision with one tree", _LATENCY_TARGET_MS, took, quick, bound, "ms", at_most=True),
            Verdict("Simulations per second, 64 trees over one tree", 5.0, ratio, many, bound),
        ]


def make_cases(names: Sequence[CaseName], sims: int, lab: Lab, seconds: float = 1.0) -> list[SearchCase]:
    """The tasks of each case."""
    network, zero, rollouts = (
        partial(SearchTask, evaluator, sims=sims) for evaluator in ("network", "zero", "rollouts")
    )
    tasks = {
        "network": [
            *[("corral", network(trees, leaves), 1) for trees, leaves in _CORRAL_SIZES],
            *[("mctx", network(trees), 1) for trees in (1, 8, 64, 256)],
            *[("lightzero", network(trees), 1) for trees in (1, 8, 64, 256)],
            ("open_spiel", network(1), 1),
        ],
        "tree": [
            ("corral", zero(64, 4), 1),
            ("corral", zero(64, 1), 1),
            ("corral", zero(1, 8), 1),
            ("corral", rollouts(64, 4), 1),
            *[("mctx", zero(trees), 1) for trees in (64, 256)],
            ("lightzero", zero(64), 1),
            ("open_spiel", zero(1), 1),
            ("open_spiel_cpp", rollouts(1), 1),
            ("open_spiel_cpp", rollouts(1), 2),
        ],
    }
    return [SearchCase(name, sims, lab, tasks[name], seconds) for name in names]


_CORRAL_SIZES = ((1, 1), (1, 4), (1, 8), (8, 4), (64, 1), (64, 4), (256, 4))


def _bound(name: str, layers: Sequence[LayerRow]) -> str:
    """What takes most of a simulation's time."""
    row = next((row for row in layers if row.name == name), None)
    if row is None:
        return ""
    parts = ", ".join(f"{part} {spread.median:.2f}" for part, spread in row.layers.items())
    return f"Bound: the {row.largest}; a simulation takes {parts} us on one core."
