"""Tables in Markdown, and their places in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from corral.core.errors import UserError


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are aligned."""
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
    return [
        _line(head, widths),
        _line(["-" * width for width in widths], widths),
        *(_line(row, widths) for row in rows),
    ]


def write_between(path: Path, marks: tuple[str, str], lines: Sequence[str]) -> None:
    """Put lines between two markers of a file, in place of what was there."""
    before, after = marks
    head, start, rest = path.read_text().partition(before) if path.exists() else ("", "", "")
    _, end, tail = rest.partition(after)
    if not start or not end:
        raise UserError(f"{path} has no place for the table: it needs the lines {before} and {after}.")
    path.write_text("\n".join([f"{head}{before}", *lines, f"{after}{tail}"]))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
