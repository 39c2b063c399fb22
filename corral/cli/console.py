"""How the commands print: coloured and wrapped on a terminal, one plain line per fact anywhere else."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from corral.core.errors import UserError

_NEVER_WRAP = 10_000


def make_console() -> Console:
    """Console for standard output."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _NEVER_WRAP)


def print_row(console: Console, *cells: tuple[str, int | None, str]) -> None:
    """Print one row of a table whose rows come one by one; a cell is its text, width and style."""
    row = Table.grid(padding=(0, 2))
    for _, width, style in cells:
        row.add_column(width=width, style=style, overflow="fold")
    row.add_row(*(text for text, _, _ in cells))
    with console.capture() as capture:
        console.print(row)
    console.out("\n".join(line.rstrip() for line in capture.get().splitlines()), highlight=False)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on a terminal; elsewhere one line per row, without titles, with tabs between cells."""
    if not sys.stdout.isatty():
        for row in rows:
            print(*row, sep="\t")
        return
    table = Table(*titles, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    make_console().print(table)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write the results of a command."""
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"The results cannot be written to {path}: {error.strerror}.") from error


def number_format(*values: float) -> Callable[[float], str]:
    """How to write numbers like these: one decimal, or more where returns are small, such as MiniGrid's below 1."""
    size = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    decimals = 1 if size >= 10 or size == 0 else max(2, 2 - math.floor(math.log10(size)))
    return lambda value: f"{value:.{decimals}f}"
