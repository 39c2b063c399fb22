"""What the commands share: checks of their options, measuring their cases, the progress line, and the files."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from rich.console import Console

from benchmarks.common.chart import save_chart
from benchmarks.common.facts import CpuTimes, facts
from benchmarks.common.report import CaseReport, Comparison, Report, print_case, print_verdicts
from benchmarks.common.rounds import play
from corral.cli.console import make_console
from corral.cli.doctor import Machine, look
from corral.core.errors import UserError

Say = Callable[[str], None]
"""Shows what is being measured."""


class Interleaved(Protocol):
    """Options of every command that measures in interleaved rounds."""

    @property
    def rounds(self) -> int:
        """How often every contestant runs."""

    @property
    def seconds(self) -> float:
        """How long it runs each time."""

    @property
    def out(self) -> Path:
        """Folder for the files."""


def require_at_least_one(**options: int | None) -> None:
    """UserError where an option that counts something is below 1."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")


def require_folder(out: Path) -> None:
    """Make the folder for the results; UserError where it cannot be one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be a folder: {error.strerror}.") from error


def require_interleaved(command: Interleaved) -> None:
    """Check the options of `Interleaved`, and make the folder."""
    require_at_least_one(rounds=command.rounds)
    if not 0 < command.seconds < 3600:
        raise UserError(f"--seconds must be positive and below an hour, got {command.seconds:g}.")
    require_folder(command.out)


def run_cases(
    name: str,
    settings: dict[str, object],
    command: Interleaved,
    cases: Iterable[Comparison],
    extra: Callable[[Report, Console, Say], None] = lambda report, console, say: None,
) -> int:
    """Measure and print one case after the other, then `extra`, the targets and the machine; write the files."""
    console = make_console()
    with progress() as say:
        report, machine = open_report(settings, say)
        for case in cases:
            report.cases.append(measure(case, command, say))
            say("")
            print_case(console, report.cases[-1])
        extra(report, console, say)
    if report.cases:
        print_verdicts(console, report.cases)
    console.print(machine_line(report, machine))
    console.print(write_files(report, command.out, name))
    return 0


def open_report(settings: dict[str, object], say: Say) -> tuple[Report, Machine]:
    """An empty report on this machine; Corral logs only warnings from here on."""
    logging.getLogger("corral").setLevel(logging.WARNING)  # which backend was chosen is in the table
    say("looking at the machine")
    machine = look()
    return Report(settings, facts() | {"machine": asdict(machine)}), machine


def measure(
    case: Comparison, command: Interleaved, say: Say, cpu_times: Callable[[], CpuTimes | None] = CpuTimes.now
) -> CaseReport:
    """Measure one case, and the share of the CPU that other programs used meanwhile."""
    before = cpu_times()
    outcome = play(case.entries, command.rounds, command.seconds, labelled(say, case.label))
    after = cpu_times()
    others = after.others_since(before) if before and after else None
    layers = case.layers(outcome)
    return CaseReport(case, outcome, layers, case.verdicts(outcome, layers), others, case.base(outcome), case.scale)


def machine_line(report: Report, machine: Machine) -> str:
    """The machine in one line."""
    wake = "" if machine.wake_up_s is None else f", waking a process takes {machine.wake_up_s * 1e6:.0f} us"
    scaling = machine.two_process_speedup
    counting = "" if scaling is None else f", two counting processes get {scaling:.2f} times as much done as one"
    load = "" if machine.load is None else f", load {machine.load:.1f} at the start"
    return f"Machine: {report.facts['cores']} cores of {report.facts['cpu']}{counting}{wake}{load}."


def write_files(report: Report, out: Path, name: str) -> str:
    """Write the JSON and, where matplotlib is there and something was measured, the PNG; returns what was written."""
    files = [out / f"{name}.json"]
    files[0].write_text(json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")
    missing = ""
    try:
        if any(case.outcome.rates for case in report.cases):
            save_chart(report, out / f"{name}.png")
            files.append(out / f"{name}.png")
    except ImportError:
        missing = " No PNG: matplotlib is missing, pip install 'corral-rl[plot]'."
    return f"Wrote {' and '.join(map(str, files))}.{missing}"


def labelled(say: Say, label: str) -> Say:
    """`say` with a label before the text."""
    return lambda text: say(f"{label}: {text}")


@contextmanager
def progress() -> Iterator[Say]:
    """A line on the terminal that shows what is being measured; nothing where there is no terminal.

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
