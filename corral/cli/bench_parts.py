"""What the benchmark commands have in common: checks of their options, the progress line, and the files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from corral.core.errors import UserError

if TYPE_CHECKING:
    from corral.bench.report import Report
    from corral.cli.doctor import Machine


def require_at_least_one(**options: int | None) -> None:
    """UserError where an option that counts something is below 1."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")


def require_seconds(seconds: float) -> None:
    """UserError where the length of a slice makes no sense."""
    if not 0 < seconds < 3600:
        raise UserError(f"--seconds must be positive and below an hour, got {seconds:g}.")


def require_folder(out: Path) -> None:
    """Make the folder for the results; UserError where it cannot be one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be a folder: {error.strerror}.") from error


def machine_facts(machine: Machine) -> dict[str, object]:
    """Machine, versions and date."""
    from corral.bench.facts import facts

    return facts() | {"machine": asdict(machine)}


def machine_line(report: Report, machine: Machine) -> str:
    """The machine in one line."""
    facts = report.facts
    wake = "" if machine.wake_up_s is None else f", waking a process takes {machine.wake_up_s * 1e6:.0f} us"
    scaling = machine.two_process_speedup
    counting = "" if scaling is None else f", two counting processes get {scaling:.2f} times as much done as one"
    load = "" if machine.load is None else f", load {machine.load:.1f} at the start"
    return f"Machine: {facts['cores']} cores of {facts['cpu']}{counting}{wake}{load}."


def write_files(report: Report, out: Path, name: str) -> str:
    """Write the JSON and, where matplotlib is there and something was measured, the PNG; returns what was written."""
    from corral.bench.chart import save_chart

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


def labelled(say: Callable[[str], None], label: str) -> Callable[[str], None]:
    """What `say` says, with a label before it."""
    return lambda text: say(f"{label}: {text}")


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
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
