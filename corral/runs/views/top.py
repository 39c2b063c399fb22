"""The current state of a run, read from its directory alone."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from corral.core.machine import resident_bytes
from corral.core.portable import pointed_to
from corral.core.types import Array
from corral.runs.callbacks.progress import brief, duration
from corral.runs.checkpoints.checkpoint import MANIFEST
from corral.runs.events import count_events, read_events
from corral.runs.folder import RunFolder
from corral.runs.sinks.csv import read_metrics

State = Literal["running", "finished", "stopped", "failed", "killed", "not started"]
_ENDS: dict[str, State] = {"finished": "finished", "stopped": "stopped", "failed": "failed", "resumed": "killed"}
"""Kind of the last event of a run that is not locked -> its state."""
_COUNTED = {
    "env/restarts": "environment restarts",
    "learn/skipped": "skipped updates",
    "actors/restarts": "actor restarts",
    "lag/dropped": "stale sequences dropped",
}
_TAIL = 1 << 21
_SILENT_S = 60.0
_RATE_WINDOW_S = 10.0
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40


@dataclass(frozen=True)
class View:
    """State of a run and the lines that describe it, each a name and a text."""

    state: State
    lines: list[tuple[str, str]]


def look(folder: RunFolder) -> View:
    """Look at a run; reads the end of its metrics, its events and its lock, and writes nothing."""
    columns = read_metrics(folder.metrics_csv, last_bytes=_TAIL)
    if columns:  # a row of an evaluation in the background comes later than those after its step
        columns["env_steps"] = np.maximum.accumulate(columns["env_steps"])
    pid = folder.holder()
    state = "running" if pid is not None else _ended(folder, columns)
    steps, total = int(_last(columns, "env_steps") or 0), int(folder.config.get("steps") or 0)
    rate = _rate_now(columns)
    lines = [("run", f"{folder.path}  ({folder.algo}, {folder.env}, seed {folder.config.get('seed', '?')})")]
    lines.append(("status", _status(folder, state, pid)))
    lines.append(("steps", f"{steps:,} of {total:,}  {100 * steps / total:.1f}%" if total else f"{steps:,}"))
    lines += _speed(columns, steps, rate)
    if state == "running" and rate and total > steps:
        lines.append(("time left", duration((total - steps) / rate)))
    lines += _results(columns)
    lines += _checkpoints(folder.checkpoints)
    lines.append(("events", _events(folder, columns)))
    lines += _processes(folder, columns) if state == "running" else []
    memory = pid and resident_bytes(pid)
    if memory:
        lines.append(("memory", f"{memory / 2**20:,.0f} MB"))
    return View(state, lines)


def _ended(folder: RunFolder, columns: dict[str, Array]) -> State:
    kinds = [event["kind"] for event in read_events(folder.events_jsonl) if event["kind"] in _ENDS]
    if kinds:
        return _ENDS[kinds[-1]]
    return "killed" if columns else "not started"


def _status(folder: RunFolder, state: State, pid: int | None) -> str:
    silence = _age(folder.metrics_csv)
    since = "" if silence is None else f", last row {duration(silence)} ago"
    if state == "running":
        quiet = silence is not None and silence > _SILENT_S
        return f"running (pid {pid}){since}{', longer than usual' if quiet else ''}"
    hint = "; `corral resume` continues it" if state in ("killed", "stopped", "failed") else ""
    return f"{'killed or crashed' if state == 'killed' else state}{since}{hint}"


def _speed(columns: dict[str, Array], steps: int, rate: float | None) -> list[tuple[str, str]]:
    wall = _last(columns, "wall_s")
    if not wall:
        return []
    now = f"{brief(rate)} now, " if rate else ""
    return [("steps/s", f"{now}{brief(steps / wall)} on average"), ("wall time", duration(wall))]


def _rate_now(columns: dict[str, Array]) -> float | None:
    """Steps per second over the rows of the last ten seconds or so."""
    if not columns or len(columns["wall_s"]) < 2:
        return None
    steps, wall = columns["env_steps"], columns["wall_s"]
    start = min(int(np.searchsorted(wall, wall[-1] - _RATE_WINDOW_S)), len(wall) - 2)
    spent = wall[-1] - wall[start]
    return float((steps[-1] - steps[start]) / spent) if spent > 0 else None


def _results(columns: dict[str, Array]) -> list[tuple[str, str]]:
    """Return, evaluation, losses and lag, if the run has them."""
    lines = []
    for name, label in (("train/return", "return"), ("eval/return", "last eval")):
        value = _last(columns, name)
        if value is not None:
            lines.append((label, f"{brief(value):<8} {_spark(columns[name])}".rstrip()))
    losses = {name.removeprefix("loss/"): _last(columns, name) for name in columns if name.startswith("loss/")}
    lags = {name: _last(columns, name) for name in columns if "lag" in re.split("[/_]", name)}
    for label, found in (("losses", losses), ("lag", lags)):
        text = ", ".join(f"{name} {brief(value)}" for name, value in found.items() if value is not None)
        if text:
            lines.append((label, text))
    return lines


def _processes(folder: RunFolder, columns: dict[str, Array]) -> list[tuple[str, str]]:
    """Other processes of a run: pid, lag, restarts and memory; and the data in flight."""
    try:
        processes = json.loads(folder.processes_json.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    lines = []
    for process in processes:
        memory = process["pid"] and resident_bytes(process["pid"])
        facts = [f"pid {process['pid']}" if process["alive"] else "crashed, restarting"]
        facts += [f"lag {process['lag']}"] if "lag" in process else []
        facts += [f"{process['restarts']} restarts"] if process["restarts"] else []
        facts += [f"{memory / 2**20:,.0f} MB"] if memory else []
        lines.append((process["name"], ", ".join(facts)))
    queued, in_flight = _last(columns, "store/size"), _last(columns, "actors/in_flight_mb")
    if queued is not None and in_flight is not None:
        lines.append(("in flight", f"{queued:,.0f} in the store, {in_flight:.2f} MB from the actors"))
    return lines


def _checkpoints(path: Path) -> list[tuple[str, str]]:
    lines = []
    for name, label in (("latest", "checkpoint"), ("best", "best")):
        target = pointed_to(path / name)
        age = None if target is None else _age(path / target / MANIFEST)
        if age is not None:
            lines.append((label, f"{target}, {duration(age)} ago"))
    return lines or [("checkpoint", "none yet")]


def _events(folder: RunFolder, columns: dict[str, Array]) -> str:
    """Number of events of each kind, including those counted by metrics."""
    counts = [(kind, n) for kind, n in count_events(folder.events_jsonl).most_common() if kind not in _ENDS]
    counts += [(label, int(_last(columns, name) or 0)) for name, label in _COUNTED.items()]
    return ", ".join(f"{count:,} {kind}" for kind, count in counts if count) or "none"


def _last(columns: dict[str, Array], name: str) -> float | None:
    """The last value of an existing column; NaN only if it has no other."""
    if name not in columns:
        return None
    there = columns[name][~np.isnan(columns[name])]
    return float(there[-1]) if len(there) else None


def _spark(values: Array) -> str:
    """A metric over time in a few characters, from its lowest to its highest value."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return ""
    bars = [part.mean() for part in np.array_split(values, min(_SPARK_WIDTH, len(values)))]
    low, high = min(bars), max(bars)
    heights = [(bar - low) / (high - low) if high > low else 0.5 for bar in bars]
    return "".join(_SPARKS[min(int(height * len(_SPARKS)), len(_SPARKS) - 1)] for height in heights)


def _age(path: Path) -> float | None:
    try:
        return max(time.time() - path.stat().st_mtime, 0.0)
    except OSError:
        return None
