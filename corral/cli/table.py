"""Lists that people read as a table, and programs as lines with tabs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on a terminal; elsewhere one line per row, without titles, its cells apart by tabs."""
    if not sys.stdout.isatty():
        for row in rows:
            print(*row, sep="\t")
        return
    from rich.table import Table

    from corral.cli.console import make_console

    table = Table(*titles, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    make_console().print(table)
