"""Tables in Markdown, and writing them into files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from corral.core.errors import UserError


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns."""
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
    return [
        _line(head, widths),
        _line(["-" * width for width in widths], widths),
        *(_line(row, widths) for row in rows),
    ]


def write_between(path: Path, marks: tuple[str, str], lines: Sequence[str]) -> None:
    """Replace the lines between two markers of a file."""
    before, after = marks
    head, start, rest = path.read_text().partition(before) if path.exists() else ("", "", "")
    _, end, tail = rest.partition(after)
    if not start or not end:
        raise UserError(f"{path} has no place for the table: add the lines {before} and {after}.")
    path.write_text("\n".join([f"{head}{before}", *lines, f"{after}{tail}"]))


def picture_place(path: Path, name: str) -> Path:
    """Where the picture for a file with tables goes: docs/ beside it if that exists, or its own folder."""
    folder = path.parent / "docs"
    return (folder if folder.is_dir() else path.parent) / name


def relative(picture: Path, path: Path) -> str:
    """The path of a picture as seen from the file that shows it."""
    return os.path.relpath(picture, path.parent)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
