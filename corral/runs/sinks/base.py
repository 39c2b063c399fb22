"""What a run measures: `metrics.csv` and TensorBoard, always both, with the same names and the same steps."""

from __future__ import annotations

import csv
import io
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from corral.core.errors import RunFailed, UserError
from corral.core.types import Array
from corral.runs.folder import RunFolder

FIRST = ("env_steps", "wall_s")


class MetricsLog:
    """Writes rows of numbers. Each is in the files when `write` returns, whatever happens to the process after it.

    A run that goes on from a checkpoint gives its step as `purge_after`: rows beyond it, which the run is about to
    play again, are cut.
    """

    def __init__(self, folder: RunFolder, purge_after: int | None = None) -> None:
        self._path = folder.metrics_csv
        header, rows = _read_rows(self._path)
        if purge_after is not None:
            at = header.index(FIRST[0]) if header else 0
            rows = [row for row in rows if _cell(row[at]) <= purge_after]
        self._columns = header or list(FIRST)
        self._file = self._replace(self._columns, rows)
        self._tensorboard = _TensorBoardFile(folder.path, purge_after)

    def write(self, env_steps: int, wall_s: float, values: Mapping[str, Any]) -> None:
        """Add a row; `values` are numbers or tensors of one element. New names become new columns."""
        row: dict[str, Any] = {FIRST[0]: int(env_steps), FIRST[1]: round(float(wall_s), 3)}
        row |= {name: _number(value) for name, value in values.items() if name not in FIRST}
        new = [name for name in row if name not in self._columns]
        if new:
            self._file.close()
            _, rows = _read_rows(self._path)
            self._columns += new
            self._file = self._replace(self._columns, rows)
        self._append(_line(row.get(name, "") for name in self._columns).encode())
        self._tensorboard.write(env_steps, {name: float(v) for name, v in row.items() if name != FIRST[0]})

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._tensorboard.close()

    def _append(self, line: bytes) -> None:
        try:
            if self._file.write(line) == len(line):
                return
            reason: str | None = "No space left on device"
        except OSError as error:
            reason = error.strerror
        raise RunFailed(f"{self._path} cannot be written ({reason}): make room for it and `corral resume` the run.")

    def _replace(self, columns: list[str], rows: list[list[str]]) -> io.FileIO:
        """Put a file with these columns and rows in place of the old one at once, and go on at its end."""
        temporary = self._path.with_name(f".tmp-{self._path.name}")
        with open(temporary, "w", newline="") as file:
            file.write(_line(columns))
            for row in rows:
                file.write(_line(row + [""] * (len(columns) - len(row))))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        return io.FileIO(self._path, "ab")  # unbuffered: a row is in the file when write returns


def read_metrics(path: str | Path, *, last_bytes: int | None = None) -> dict[str, Array]:
    """Columns of a run's `metrics.csv` as float64 by name, NaN where a row has no value; {} when there is no row.

    `path` is the run directory or the file. With `last_bytes`, only the rows in the end of the file are read.
    """
    path = Path(path)
    header, rows = _read_rows(path / "metrics.csv" if path.is_dir() else path, last_bytes)
    if not rows:
        return {}
    table = np.array([[_cell(cell) for cell in row] for row in rows])
    return {name: table[:, i].copy() for i, name in enumerate(header)}


def _read_rows(path: Path, last_bytes: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Header and rows, without a last line that has no end because the process was killed while it wrote."""
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
    if FIRST[0] not in header:
        raise UserError(f"{path} is no table of metrics: restore it, or remove it to go on without what it held.")
    text = body.decode(errors="replace").replace("\0", "")
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if len(row) == len(header)]
    return header, rows


def _cell(text: str) -> float:
    """A number; NaN where there is none, or what was written was harmed."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _line(cells: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _number(value: Any) -> int | float:
    return int(value) if isinstance(value, int | np.integer) else float(value)


class _TensorBoardFile:
    """One event file. Without TensorBoard's own writer, whose thread is in the way of forking and of a last row."""

    def __init__(self, folder: Path, purge_after: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter(io.FileIO(folder / name, "wb"))
        self._put(file_version="brain.Event:2")
        if purge_after is not None:  # TensorBoard then forgets what it has from this step on
            self._put(step=purge_after + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._put(step=int(step), summary=self._summary(value=scalars))

    def close(self) -> None:
        self._file.close()

    def _put(self, **fields: Any) -> None:
        self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())
