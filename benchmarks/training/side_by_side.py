"""Several runs at once on one machine: two on images and two on CartPole, each compared with one alone.

Every run is started by `corral train`, with the settings that a user gets. Runs that are compared are started together,
because a run chooses its number of threads when it starts.
"""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.children import child_env, failure
from benchmarks.common.deadline import TookTooLong
from benchmarks.common.rounds import Slice, Spread
from corral.runtimes.orphan_reaper import OrphanReaper

NEEDED = 0.8
_START_S = 300.0
_POLL_S = 0.1
_OPTIONS = ("--quiet", "--steps", "1000000000", "--set", "eval_episodes=0", "log_every_s=0.2")
_RUNS: Mapping[str, Sequence[str]] = {
    "images": ("ppo", "--env", "ALE/Pong-v5"),
    "MLP": ("ppo", "--env", "CartPole-v1"),
}
GROUPS: Mapping[str, Sequence[str]] = {
    "1 images": ("images",),
    "1 MLP": ("MLP",),
    "2 images": ("images",) * 2,
    "2 MLP": ("MLP",) * 2,
    "2 images + 2 MLP": ("images", "images", "MLP", "MLP"),
}


@dataclass(frozen=True)
class SideBySide:
    """Steps per second by group, for each of its runs one list with a value per round."""

    rates: Mapping[str, Sequence[Sequence[float]]]

    def shares(self, group: str) -> list[Spread]:
        """Rates of a group's runs as fractions of one alone in the same round, and last their sum."""
        kinds = GROUPS[group]
        alone = [self.rates[f"1 {kind}"][0] for kind in kinds]
        found = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(self.rates[group], alone, strict=True)]
        return [Spread.of(values) for values in (*found, [sum(values) for values in zip(*found, strict=True)])]

    def to_json(self) -> dict[str, Any]:
        shared = [group for group, kinds in GROUPS.items() if len(kinds) > 1]
        return {
            "rates": {group: [list(values) for values in found] for group, found in self.rates.items()},
            "shares": {group: [asdict(spread) for spread in self.shares(group)] for group in shared},
        }


def measure(rounds: int, seconds: float, say: Callable[[str], None]) -> SideBySide:
    """Run every group in every round."""
    rates: dict[str, list[list[float]]] = defaultdict(list)
    for k in range(rounds):
        for group, kinds in GROUPS.items():
            say(f"side by side, round {k + 1}: {group}")
            found = run_together([_RUNS[kind] for kind in kinds], seconds)
            rates[group] = rates[group] or [[] for _ in found]
            for values, done in zip(rates[group], found, strict=True):
                values.append(done.rate)
    return SideBySide(rates)


def run_together(runs: Sequence[Sequence[str]], seconds: float) -> list[Slice]:
    """Start these runs at once, wait until all of them train, and count their steps for this long."""
    with tempfile.TemporaryDirectory(prefix="corral-bench-", ignore_cleanup_errors=True) as folder:
        dirs = [Path(folder) / str(k) for k in range(len(runs))]
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(_training(run, path)) for run, path in zip(runs, dirs, strict=True)]
            _await_steps(processes, dirs)
            before = [_progress(path) for path in dirs]
            time.sleep(seconds)
            after = [_progress(path) for path in dirs]
            _require_running(processes, dirs)
    made = zip(before, after, strict=True)
    return [Slice(int(then[0] - now[0]), max(then[1] - now[1], _POLL_S)) for now, then in made]


@contextlib.contextmanager
def _training(run: Sequence[str], path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`corral train` in a session of its own, which is killed at the end, and when this process ends."""
    command = [sys.executable, "-m", "corral", "train", *run, "--run-dir", str(path), *_OPTIONS]
    with open(f"{path}.err", "wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=child_env(), start_new_session=True
        )
    reaper = OrphanReaper()
    reaper.watch(process.pid)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reaper.unwatch(process.pid)
        reaper.stop()


def _await_steps(processes: Sequence[subprocess.Popen[bytes]], dirs: Sequence[Path]) -> None:
    until = time.monotonic() + _START_S
    while not all(_progress(path)[0] for path in dirs):
        _require_running(processes, dirs)
        if time.monotonic() > until:
            raise TookTooLong("a run did not begin in time")
        time.sleep(_POLL_S)


def _require_running(processes: Sequence[subprocess.Popen[bytes]], dirs: Sequence[Path]) -> None:
    for process, path in zip(processes, dirs, strict=True):
        if process.poll() is not None:
            raise failure(Path(f"{path}.err").read_bytes())


def _progress(path: Path) -> tuple[float, float]:
    """Steps and seconds in the last complete row of a run's metrics; 0 before the first."""
    try:
        lines = (path / "metrics.csv").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return 0.0, 0.0
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < 2:
        return 0.0, 0.0
    row = dict(zip(*csv.reader([whole[0], whole[-1]]), strict=False))
    return float(row["env_steps"]), float(row["wall_s"])


def print_shares(console: Console, result: SideBySide) -> None:
    """Print the rates of every group, and what is left of one alone."""
    console.print("\nSeveral runs at once, steps per second, and as a fraction of one alone\n", style="bold")
    for group, kinds in GROUPS.items():
        rates = [Spread.of(values) for values in result.rates[group]]
        text = ", ".join(f"{kind} {rate.median:,.0f}" for kind, rate in zip(kinds, rates, strict=True))
        if len(kinds) > 1:
            *each, total = result.shares(group)
            outcome = "met" if total.median >= NEEDED else "not met"
            text += f"; fractions {', '.join(f'{share.median:.2f}' for share in each)}, sum {total.median:.2f} "
            text += f"(range {total.low:.2f} to {total.high:.2f}; target: at least {NEEDED:g}, {outcome})"
        console.print(f"{group}: {text}")
