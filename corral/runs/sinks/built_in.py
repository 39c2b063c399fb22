"""The built-in sinks by name: a new one is a file in this folder and a line here."""

from __future__ import annotations

from collections.abc import Callable

from corral.runs.folder import RunFolder
from corral.runs.sinks.base import MetricSink
from corral.runs.sinks.csv import CsvSink
from corral.runs.sinks.tensorboard import TensorBoardSink

BUILT_IN_SINKS: dict[str, Callable[[RunFolder, int | None], MetricSink]] = {
    "csv": lambda folder, purge_after: CsvSink(folder.metrics_csv, purge_after),
    "tensorboard": lambda folder, purge_after: TensorBoardSink(folder.path, purge_after),
}
"""Makes a sink of a run; a resumed run drops rows after the step `purge_after`, which will be written again."""
DEFAULT_SINKS = ("csv", "tensorboard")
"""Those of a run that names none."""
