"""Shared by the commands: checks of options, measuring cases, the progress line, and the files."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from benchmarks.common.chart import save_chart
from benchmarks.common.facts import CpuTimes, facts
from benchmarks.common.report import CaseReport, Comparison, Report, print_case, print_verdicts
from benchmarks.common.rounds import play
from corral.cli.console import make_console
from corral.cli.doctor import Machine, look
from corral.core.errors import UserError

Say = Callable[[str], None]
"""Shows a progress message."""


class Interleaved(Protocol):
    """Options of every command that measures in interleaved rounds."""

    @property
    def rounds(self) -> int:
        """Number of rounds; every contestant runs in each."""

    @property
    def seconds(self) -> float:
        """Seconds per contestant and round."""

    @property
    def out(self) -> Path:
        """Folder for the files."""


def require_at_least_one(**options: int | None) -> None:
    """UserError if one of these counts is below 1."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")


def require_folder(out: Path) -> None:
    """Create the folder for the results; UserError if that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be created as a folder: {error.strerror}.") from error


def require_interleaved(command: Interleaved) -> None:
    """Check the options of `Interleaved`, and create the folder."""
    require_at_least_one(rounds=command.rounds)
    if not 0 < command.seconds < 3600:
        raise UserError(f"--seconds must be positive and below 3600, got {command.seconds:g}.")
    require_folder(command.out)


def given_options(command: Any, *names: str) -> str:
    """Those of these options that are not at their defaults, as typed on the command line."""
    given = {name: getattr(command, name) for name in names}
    return "".join(
        f" --{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in given.items()
        if value != getattr(type(command), name)
    )


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
    """An empty report with the facts of this machine; from now on Corral logs only warnings."""
    logging.getLogger("corral").setLevel(logging.WARNING)  # the table already shows the chosen backend
    say("inspecting the machine")
    machine = look()
    return Report(settings, facts() | {"machine": asdict(machine)}), machine


def measure(
    case: Comparison, command: Interleaved, say: Say, cpu_times: Callable[[], CpuTimes | None] = CpuTimes.now
) -> CaseReport:
    """Measure one case, and the CPU share of other programs meanwhile."""
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
    counting = "" if scaling is None else f", two processes count {scaling:.2f} times as fast as one"
    load = "" if machine.load is None else f", load {machine.load:.1f} at the start"
    return f"Machine: {report.facts['cores']} cores of {report.facts['cpu']}{counting}{wake}{load}."


def write_files(report: Report, out: Path, name: str) -> str:
    """Write the JSON and, with matplotlib and at least one result, the PNG; returns a message naming the files."""
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
    """A progress line on the terminal; nothing if stderr is not a terminal.

    rich's own display is not used: its thread would disturb measurements and forks.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    clear = "\r\x1b[K"
    try:
        yield lambda text: print(f"{clear}{text}", end="", file=sys.stderr, flush=True)
    finally:
        print(clear, end="", file=sys.stderr, flush=True)
