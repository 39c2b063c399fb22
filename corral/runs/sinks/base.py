"""`corral.MetricSink`, the contract of a sink, and the sinks of a run as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from corral.core.errors import RunFailed, UserError
from corral.runs.callbacks.slow_calls import SlowCalls

STEP, WALL_S = "env_steps", "wall_s"


@runtime_checkable
class MetricSink(Protocol):
    """Receives the rows of metrics that a run writes, in the learner's process."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take one row: environment steps so far, and metrics by name, including `wall_s`."""

    def close(self) -> None:
        """Called once, after the last row."""


class MetricSinks:
    """All sinks of a run. One that raises is reported and dropped; `RunFailed` and `UserError` end the run."""

    def __init__(self, sinks: Sequence[MetricSink], report: Callable[[str], None], slow_calls: SlowCalls) -> None:
        self._sinks, self._report, self._slow_calls = list(sinks), report, slow_calls

    def write(self, step: int, wall_s: float, values: Mapping[str, Any]) -> None:
        """Write a row to every sink; `values` are numbers or tensors of one element."""
        row: dict[str, float] = {WALL_S: round(float(wall_s), 3)}
        row |= {name: _number(value) for name, value in values.items() if name not in (STEP, WALL_S)}
        for sink in list(self._sinks):
            try:
                with self._slow_calls.watch("sink", f"{_name(sink)}.write"):
                    sink.write(int(step), dict(row))  # a copy: a sink may change it, or keep it
            except (RunFailed, UserError):
                raise
            except Exception as error:
                self._sinks.remove(sink)
                self._report(f"metric sink {_name(sink)} is dropped: write raised {type(error).__name__}: {error}")
                self._close(sink)

    def close(self) -> None:
        for sink in self._sinks:
            self._close(sink)

    def _close(self, sink: MetricSink) -> None:
        try:
            with self._slow_calls.watch("sink", f"{_name(sink)}.close"):
                sink.close()
        except Exception as error:
            self._report(f"metric sink {_name(sink)}: close raised {type(error).__name__}: {error}")


def _name(sink: MetricSink) -> str:
    return type(sink).__qualname__


def _number(value: Any) -> int | float:
    return int(value) if isinstance(value, int | np.integer) else float(value)
