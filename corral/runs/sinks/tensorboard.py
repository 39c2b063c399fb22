"""TensorBoard event files."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardSink:
    """One event file. TensorBoard's own writer has a thread, which breaks forking and may lose the last row.

    A resumed run passes the step of its checkpoint as `purge_after`: TensorBoard forgets later rows.
    """

    def __init__(self, folder: Path, purge_after: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = RecordWriter(io.FileIO(folder / name, "wb"))
        self._put(file_version="brain.Event:2")
        if purge_after is not None:
            self._put(step=purge_after + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        self._put(step=step, summary=self._summary(value=scalars))

    def close(self) -> None:
        self._file.close()

    def _put(self, **fields: Any) -> None:
        self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())
