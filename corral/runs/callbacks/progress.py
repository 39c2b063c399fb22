"""Live progress of a run on stderr: one rewritten line on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from corral.runs.callbacks.base import Callback, Run

_REWRITE_S = 0.1
_FIRST_LINE_S, _LINE_S = 2.0, 10.0
_RATE_WINDOW_S = 10.0
_SHOWN = {"train/return": "return", "eval/return": "eval"}
_LOSSES = ("policy", "value", "entropy", "td", "q")
_CLEAR = "\r\x1b[K"


class Progress(Callback):
    """Shows steps, steps/s, return, evaluation, terms of the loss and time left; never blocks.

    `start` is the step of a resume.
    """

    def __init__(self, total: int, *, start: int = 0, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream: TextIO | None = sys.stderr if stream is None else stream  # None: the process has no stderr
        self._quiet = quiet or self._stream is None
        terminal = self._stream is not None and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._live = terminal and not quiet
        self._metrics: dict[str, float] = {}
        self._started = now = time.monotonic()
        self._next = now if self._live else now + _FIRST_LINE_S
        self._points: deque[tuple[float, int]] = deque([(now, start)])
        self._steps = self._shown = start

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.update(run.steps, run.metrics if self._due() else None)  # computing them takes time

    def on_end(self, run: Run) -> None:
        self._metrics.update(run.metrics)
        self.close()

    def update(self, env_steps: int, metrics: Mapping[str, float] | None = None) -> None:
        self._steps = env_steps
        self._metrics.update(metrics or {})
        if not self._due():
            return
        now = time.monotonic()
        self._next = now + (_REWRITE_S if self._live else _LINE_S)
        self._show(now)

    def _due(self) -> bool:
        return not self._quiet and time.monotonic() >= self._next

    def busy(self, env_steps: int, text: str) -> None:
        """Show what the run does while it does not train."""
        self._steps = env_steps
        if self._due():
            now = time.monotonic()
            self._next = now + (_REWRITE_S if self._live else _LINE_S)
            line = f"{_steps_of(self._steps, self._total)}  {text}"
            width = self._width()
            self._write(f"{_CLEAR}{line[: width and width - 1]}" if self._live else f"{line}\n")

    def say(self, text: str) -> None:
        """Print a separate line; the live line continues below it."""
        if not self._quiet:
            self._write(f"{_CLEAR if self._live else ''}{text}\n")
            self._next = 0.0 if self._live else self._next

    def close(self) -> None:
        if self._quiet:
            return
        if self._live or self._steps != self._shown:
            self._show(time.monotonic())
        if self._live:
            self._write("\n")
        self._quiet = True

    def _show(self, now: float) -> None:
        self._points.append((now, self._steps))
        while len(self._points) > 2 and now - self._points[1][0] > _RATE_WINDOW_S:
            self._points.popleft()
        self._shown = self._steps
        then, before = self._points[0]
        rate = (self._steps - before) / (now - then) if now > then else 0.0
        text = progress_line(self._steps, self._total, rate, self._metrics, self._width())
        self._write(f"{_CLEAR}{text}" if self._live else f"{text}\n")

    def _width(self) -> int | None:
        if not self._live or self._stream is None:
            return None
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone; the run continues
            self._quiet = True
        except RuntimeError:  # called by a signal handler during another write
            pass


def progress_line(steps: int, total: int, rate: float, metrics: Mapping[str, float], width: int | None) -> str:
    """The progress line; fields that do not fit into `width` are dropped from the end, except the time left."""
    fields = [_steps_of(steps, total), f"{brief(rate)} steps/s"]
    known = {label: metrics[name] for name, label in _SHOWN.items() if not math.isnan(metrics.get(name, math.nan))}
    fields += [f"{label} {brief(value)}" for label, value in known.items()]
    losses = {name: metrics[f"loss/{name}"] for name in _LOSSES if f"loss/{name}" in metrics}
    fields += [f"{name} {brief(value)}" for name, value in losses.items()]
    left = [f"ETA {duration((total - steps) / rate)}"] if rate > 0 and steps < total else []
    while width is not None and len(fields) > 1 and len("  ".join(fields + left)) >= width:
        fields.pop()
    line = "  ".join(fields + left)
    if width is not None and len(line) >= width:
        line = fields[0][: max(width - 1, 0)]
    return line


def _steps_of(steps: int, total: int) -> str:
    """Steps and their percentage, which whole fragments exceed and which is below 100 until the last step."""
    share = f"{min(100, 100 * steps // total)}%" if total > 0 else ""
    return f"{steps:,}/{brief(total)} {share}".rstrip()


def brief(value: float) -> str:
    """A number in about seven characters: 12.3k, 0.0342, -200.1, 1.2e-06."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for least, unit, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            scaled = value / unit
            return f"{scaled:.0f}{name}" if abs(scaled) >= 100 else f"{scaled:.3g}{name}"
    if size >= 100 or value == 0:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as 0:07, 12:30, 3:05:00 or 2d 03h."""
    if not math.isfinite(seconds):
        return "-"
    whole = int(seconds + 0.5)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d {hours % 24:02d}h"
    return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
