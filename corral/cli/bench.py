"""`corral bench sampling`: environment steps per second, beside other libraries, in one run."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from corral.core.errors import UserError

if TYPE_CHECKING:
    from corral.bench.report import CaseReport, Report
    from corral.cli.doctor import Machine


@dataclass(frozen=True)
class BenchSampling:
    """Measure environment steps per second beside other libraries, in interleaved rounds.

    Prints tables, and writes sampling.png and sampling.json. A library that is not installed is skipped.
    """

    case: Literal["all", "cartpole", "pong", "slow"] = "all"
    """Cheap steps, images, steps that wait, or all of them."""
    num_envs: int | None = None
    """Environments; by default 64 and 8 of CartPole, 8 and 32 of Pong, 16 slow ones."""
    rounds: int = 5
    """Slices of everybody."""
    seconds: float = 1.0
    """Length of a slice."""
    out: Path = Path("bench")
    """Folder for the PNG and the JSON."""

    def run(self) -> int:
        """Measure, print, and write the files."""
        self._check()
        from corral.bench.report import Report, print_case, print_verdicts
        from corral.cli.console import make_console
        from corral.cli.doctor import look

        logging.getLogger("corral").setLevel(logging.WARNING)  # which backend was chosen is in the table
        console = make_console()
        with _progress() as say:
            say("looking at the machine")
            machine = look()
            report = Report(asdict(self) | {"out": str(self.out)}, _facts(machine))
            for case in self._measure(say):
                report.cases.append(case)
                say("")
                print_case(console, case)
        print_verdicts(console, report.cases)
        console.print(_machine_line(report, machine))
        console.print(self._write(report))
        return 0

    def _check(self) -> None:
        for name in ("num_envs", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
        if not 0 < self.seconds < 3600:
            raise UserError(f"--seconds must be positive and below an hour, got {self.seconds:g}.")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {self.out} cannot be a folder: {error.strerror}.") from error

    def _measure(self, say: Callable[[str], None]) -> Iterator[CaseReport]:
        from corral.bench.cases import CaseName, make_cases
        from corral.bench.facts import CpuTimes
        from corral.bench.layers import layers_of
        from corral.bench.report import CaseReport
        from corral.bench.rounds import play
        from corral.bench.targets import verdicts

        names: list[CaseName] = ["cartpole", "pong", "slow"] if self.case == "all" else [self.case]
        for case in make_cases(names, self.num_envs):
            before = CpuTimes.now()
            outcome = play(case.entries, self.rounds, self.seconds, _labelled(say, case.label))
            after = CpuTimes.now()
            others = after.others_since(before) if before and after else None
            yield CaseReport(case, outcome, layers_of(outcome), verdicts(case, outcome), others)

    def _write(self, report: Report) -> str:
        from corral.bench.chart import save_chart

        files = [self.out / "sampling.json"]
        files[0].write_text(json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")
        missing = ""
        try:
            save_chart(report, self.out / "sampling.png")
            files.append(self.out / "sampling.png")
        except ImportError:
            missing = " No PNG: matplotlib is missing, pip install 'corral-rl[plot]'."
        return f"Wrote {' and '.join(map(str, files))}.{missing}"


def _facts(machine: Machine) -> dict[str, object]:
    from corral.bench.facts import facts

    return facts() | {"machine": asdict(machine)}


def _machine_line(report: Report, machine: Machine) -> str:
    facts = report.facts
    wake = "" if machine.wake_up_s is None else f", waking a process takes {machine.wake_up_s * 1e6:.0f} us"
    scaling = machine.two_process_speedup
    counting = "" if scaling is None else f", two counting processes get {scaling:.2f} times as much done as one"
    load = "" if machine.load is None else f", load {machine.load:.1f} at the start"
    return f"Machine: {facts['cores']} cores of {facts['cpu']}{counting}{wake}{load}."


def _labelled(say: Callable[[str], None], label: str) -> Callable[[str], None]:
    return lambda text: say(f"{label}: {text}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Something that shows what is going on, on a terminal only.

    Without rich's own display, whose thread would be in the way of measuring and of forking.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    clear = "\r\x1b[K"
    try:
        yield lambda text: print(f"{clear}{text}", end="", file=sys.stderr, flush=True)
    finally:
        print(clear, end="", file=sys.stderr, flush=True)
