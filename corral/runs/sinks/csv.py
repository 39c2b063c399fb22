"""`metrics.csv` of a run: the sink that writes it, and `read_metrics`."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from corral.config.migrate import metric_name
from corral.core.errors import UserError
from corral.core.types import Array
from corral.runs.folder import append_line, atomic_write, write_failed
from corral.runs.sinks.base import STEP, WALL_S


class CsvSink:
    """Writes `metrics.csv`. A row is in the file when `write` returns, whatever happens to the process afterwards.

    A resumed run passes the step of its checkpoint as `purge_after`: later rows, which will be written again, are
    removed. A file that cannot be written ends the run.
    """

    def __init__(self, path: Path, purge_after: int | None = None) -> None:
        self._path = path
        header, rows = _read_rows(path)
        if purge_after is not None:
            at = header.index(STEP) if header else 0
            rows = [row for row in rows if _cell(row[at]) <= purge_after]
        self._columns = header or [STEP, WALL_S]
        self._file = self._replace(self._columns, rows)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row. New names become new columns."""
        row: dict[str, Any] = {STEP: step, **values}
        new = [name for name in row if name not in self._columns]
        if new:
            self._file.close()
            _, rows = _read_rows(self._path)
            self._columns += new
            self._file = self._replace(self._columns, rows)
        append_line(self._path, self._file, _line(row.get(name, "") for name in self._columns).encode())

    def close(self) -> None:
        self._file.close()

    def _replace(self, columns: list[str], rows: list[list[str]]) -> io.FileIO:
        """Replace the file atomically by one with these columns and rows, and open it for appending."""
        padded = [row + [""] * (len(columns) - len(row)) for row in rows]
        try:
            atomic_write(self._path, "".join(map(_line, [columns, *padded])))
            return io.FileIO(self._path, "ab")  # unbuffered: a row is in the file when write returns
        except OSError as error:
            raise write_failed(self._path, error.strerror) from error


def read_metrics(path: str | Path, *, last_bytes: int | None = None) -> dict[str, Array]:
    """Columns of a run's `metrics.csv` as float64 by name, NaN for missing values; {} if there is no row.

    `path` is the run directory or the file. With `last_bytes`, only rows at the end of the file are read.
    """
    path = Path(path)
    header, rows = _read_rows(path / "metrics.csv" if path.is_dir() else path, last_bytes)
    if not rows:
        return {}
    table = np.array([[_cell(cell) for cell in row] for row in rows])
    return {name: table[:, i].copy() for i, name in enumerate(header)}


def _read_rows(path: Path, last_bytes: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Header, in today's names, and rows, without a truncated last line."""
    try:
        with open(path, "rb") as file:
            head = file.readline()
            size = file.seek(0, os.SEEK_END)
            whole = last_bytes is None or size - len(head) <= last_bytes
            file.seek(len(head) if whole else size - (last_bytes or 0))
            body = file.read()
    except FileNotFoundError:
        return [], []
    if not head.endswith(b"\n"):
        return [], []
    if not whole:
        body = body[body.find(b"\n") + 1 :]
    body = body[: body.rfind(b"\n") + 1]
    header = next(csv.reader([head.decode(errors="replace").replace("\0", "")]), [])
    if STEP not in header:
        raise UserError(f"{path} is not a table of metrics: restore it, or remove it to continue without its rows.")
    text = body.decode(errors="replace").replace("\0", "")
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if len(row) == len(header)]
    return _renamed(header, rows)


def _renamed(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Columns of earlier versions in today's names; an old and a new column of the same metric become one."""
    columns: dict[str, list[int]] = {}
    for i, name in enumerate(header):
        columns.setdefault(metric_name(name), []).append(i)
    if len(columns) < len(header):
        rows = [[next(filter(None, (row[i] for i in at)), "") for at in columns.values()] for row in rows]
    return list(columns), rows


def _cell(text: str) -> float:
    """A number; NaN for an empty or damaged cell."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _line(cells: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
