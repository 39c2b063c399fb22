"""`python -m benchmarks frozen`: speed of Corral relative to an earlier commit, on this machine.

Each case is a contestant of another benchmark. Each tree builds it with its own code in a separate process, so settings
may have other names there. Both trees take turns, and ratios are computed within rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.common.children import ChildProcess
from benchmarks.common.command import Say, progress, require_at_least_one
from benchmarks.common.deadline import TookTooLong
from benchmarks.common.facts import CpuTimes, facts
from benchmarks.common.markdown import table
from benchmarks.common.rounds import Spread
from corral.core.errors import RunFailed, UserError

ROOT = Path(__file__).parents[1]
FROZEN = "205a88e"
"""The last commit before the tree was reorganised."""

_TURNS = 5  # of both trees in a round
_BUILD_S, _ANSWER_S, _END_S = 600.0, 300.0, 30.0

_SEARCH = (
    "task, case = load('search.task', 'search_task'), load('search.cases', 'search'); "
    "task.save_problem(task.make_problem(), folder / 'problem.npz'); "
    "lab = stack.enter_context(case.Lab(folder / 'problem.npz', sys.executable)); "
    "entries = case.make_cases([{name!r}], 100, lab)[0].entries"
)
# From images, in bf16 in both trees.
_PONG = (
    "training = load('training.cases', 'training'); training.ENV = 'ALE/Pong-v5'; "
    "build = training.partial(training.Training, {algo!r}, 8, precision='bf16', **({settings})); "
    "entries = [training.Entry('corral', 'corral', build)]"
)
CASES: dict[str, tuple[str, str]] = {
    **{
        f"sampling-{backend}": (
            "entries = load('sampling.cases', 'cases').make_cases(['cartpole'], 64)[0].entries", contestant
        )
        for backend, contestant in (("local", "corral local"), ("process", "corral process, lockstep"))
    },
    **{
        algo: (f"entries = load('training.cases', 'training').make_case({algo!r}).entries", contestant)
        for algo, contestant in (("ppo", "corral"), ("a2c", "corral"), ("dqn", "corral, 16 envs"))
    },
    **{
        algo: (f"entries = load('training.scaling', 'scaling').make_case({algo!r}).entries", "corral, 1 actor x 32")
        for algo in ("appo", "impala")
    },
    "ppo-pong": (_PONG.format(algo="ppo", settings="{'num_steps' if moved else 'length': 128}"), "corral"),
    "dqn-pong": (_PONG.format(algo="dqn", settings="{'learning_starts': 100}"), "corral"),
    "replay": ("entries = load('replay', 'replay').make_cases()[0].entries", "corral"),
    "link": (
        "noop = load('link.sims', 'link_sims').compile_noop(folder); "
        "entries = load('link.cases', 'link').make_cases(['many'], noop)[0].entries",
        "corral tcp",
    ),
    "search-network": (_SEARCH.format(name="network"), "corral, 64 x 4"),
    "search-tree": (_SEARCH.format(name="tree"), "corral, 64 x 4"),
}  # fmt: skip
"""By name: code that builds the contestants in either tree, and the name of the measured one."""

# `load` takes a module's path below `benchmarks`, and its former path below `corral.bench`.
_CHILD = """
import contextlib, importlib, logging, os, sys, tempfile
from pathlib import Path
import corral
tree, code, name = sys.argv[1:]
assert Path(corral.__file__).is_relative_to(tree), corral.__file__
logging.getLogger("corral").setLevel(logging.WARNING)
moved = (Path(tree) / "benchmarks").is_dir()
load = lambda new, old: importlib.import_module(f"benchmarks.{new}" if moved else f"corral.bench.{old}")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # keep other output away from the answers
with contextlib.ExitStack() as stack:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-frozen-")))
    exec(code)
    contestant = next(entry for entry in entries if entry.name == name).build()
    stack.callback(contestant.close)
    contestant.run(0.2)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        done = contestant.run(float(line))
        print(done.steps, done.seconds, file=answers, flush=True)
"""


@dataclass(frozen=True)
class CaseRatio:
    """One case: steps per second in each round, of the earlier commit and of this tree."""

    case: str
    frozen: list[float]
    here: list[float]

    @property
    def ratio(self) -> Spread:
        """This tree over the earlier commit, within rounds."""
        return Spread.of(ours / theirs for ours, theirs in zip(self.here, self.frozen, strict=True))


@dataclass(frozen=True)
class BenchFrozen:
    """Measure Corral's speed relative to an earlier commit, in interleaved rounds."""

    cases: tyro.conf.Positional[tuple[str, ...]] = ()
    """Cases to measure. Default: all."""
    commit: str = FROZEN
    """The earlier commit."""
    rounds: int = 5
    """Number of rounds; both trees run in each."""
    seconds: float = 2.0
    """Seconds that each tree runs per round, in five turns."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Also write every figure to this file, as JSON."""

    def run(self) -> int:
        require_at_least_one(rounds=self.rounds)
        if not 0 < self.seconds < 3600:
            raise UserError(f"--seconds must be positive and below an hour, got {self.seconds:g}.")
        if unknown := [name for name in self.cases if name not in CASES]:
            raise UserError(f"Unknown case {unknown[0]!r}: choose from {', '.join(CASES)}.")
        before, found = CpuTimes.now(), []
        with progress() as say, worktree(self.commit) as tree:
            for case in self.cases or CASES:
                found.append(compare(case, tree, self.rounds, self.seconds, say))
                say("")
                print(_line(found[-1]), flush=True)
        after = CpuTimes.now()
        others = after.others_since(before) if before and after else None
        print("\n".join(["", f"{_head()} over {self.commit}:", "", *_table(found)]))
        if self.out is not None:
            self._write(self.out, found, others)
        return 0

    def _write(self, path: Path, found: list[CaseRatio], others: float | None) -> None:
        report = {
            "facts": facts(),
            "commit": self.commit,
            "head": _head(),
            "rounds": self.rounds,
            "seconds": self.seconds,
            "cpu_share_of_others": others,
            "cases": [asdict(case) | {"ratio": asdict(case.ratio)} for case in found],
        }
        try:
            path.write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--out {path} cannot be written: {error.strerror}.") from error
        print(f"Wrote {path}.")


def compare(case: str, tree: Path, rounds: int, seconds: float, say: Say) -> CaseRatio:
    """Run both trees in turns, alternating which one begins.

    Every round starts new processes: memory layout alone makes two processes of the same code differ by 5 %.
    """
    rates: dict[Path, list[float]] = {tree: [], ROOT: []}
    for number in range(rounds):
        done = dict.fromkeys(rates, (0, 0.0))
        with contextlib.ExitStack() as stack:
            runners = {}
            for each in rates:
                say(f"{case}: round {number + 1} of {rounds}, building in {each}")
                runners[each] = stack.enter_context(contextlib.closing(_Runner(each, case)))
            say(f"{case}: round {number + 1} of {rounds}")
            for turn in range(_TURNS):
                for each in list(rates)[:: 1 if (number + turn) % 2 else -1]:
                    steps, took = runners[each].run(seconds / _TURNS)
                    done[each] = (done[each][0] + steps, done[each][1] + took)
        for each, (steps, took) in done.items():
            rates[each].append(steps / took)
    return CaseRatio(case, rates[tree], rates[ROOT])


class _Runner:
    """A contestant of one tree in a separate process, which is idle between calls of `run`."""

    def __init__(self, tree: Path, case: str):
        self._name = f"{case} in {tree}"
        command = [sys.executable, "-W", "ignore", "-c", _CHILD, str(tree), *CASES[case]]
        self._child = ChildProcess(command, _END_S, env={**os.environ, "PYTHONPATH": str(tree)}, cwd=tree)
        self.close = self._child.close
        try:
            self._answer(_BUILD_S)
        except BaseException:
            self.close()
            raise

    def run(self, seconds: float) -> tuple[int, float]:
        """Steps made, and the seconds that they took."""
        self._child.write_line(str(seconds))
        steps, took = self._answer(_ANSWER_S + seconds).split()
        return int(steps), float(took)

    def _answer(self, timeout_s: float) -> str:
        try:
            return self._child.read_line(timeout_s)
        except (TookTooLong, ImportError, RuntimeError) as error:
            raise RunFailed(f"{self._name} failed: {error}") from None


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A checkout of an earlier commit, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="corral-frozen-") as folder:
        tree = Path(folder).resolve() / "tree"
        _git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"git {args[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def _head() -> str:
    return _git("describe", "--always", "--dirty", "--abbrev=7", "--exclude=*")


def _line(found: CaseRatio) -> str:
    ratio = found.ratio
    return f"{found.case}: {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _table(found: list[CaseRatio]) -> list[str]:
    rows = []
    for case in found:
        before, now, ratio = Spread.of(case.frozen), Spread.of(case.here), case.ratio
        spread = f"{ratio.low:.2f} to {ratio.high:.2f}"
        rows.append((case.case, f"{before.median:,.0f}", f"{now.median:,.0f}", f"{ratio.median:.2f}", spread))
    return table(("case", "before, per second", "now, per second", "ratio", "range"), rows)
