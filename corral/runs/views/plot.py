"""`corral.plot`: learning curves of runs; runs that differ only in their seed become a mean with a band."""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from corral.config.migrate import metric_name
from corral.core.errors import UserError
from corral.core.types import Array
from corral.runs.folder import RunFolder
from corral.runs.sinks.csv import read_metrics

Axis = Literal["env_steps", "wall_s", "episodes"]
_COLUMN = {"env_steps": "env_steps", "wall_s": "wall_s", "episodes": "train/episodes"}
_NOT_COMPARED = ("seed", "log_every", "log_every_s", "checkpoint_every", "checkpoint_every_s", "keep_checkpoints",
                 "save_replay_buffer")  # fmt: skip
_MAX_POINTS = 1000
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#6a3d9a", "#4d4d4d")
_TITLES = {
    "train/return": "return of training episodes\n(mean of the last 100)",
    "eval/return": "return in evaluation\n(deterministic actions)",
    "eval/return_sampled": "return in evaluation\n(sampled actions)",
    "train/length": "length of training episodes (steps)",
    "time/steps_per_s": "environment steps per second",
}


@dataclass(frozen=True)
class Curve:
    """Runs that differ only in their seed; `count` is the number of runs with a value at each x."""

    label: str
    env: str
    runs: int
    x: Array
    mean: Array
    low: Array
    high: Array
    count: Array


def plot(runs: str | Path | Sequence[str | Path], path: str | Path, **options: Any) -> Path:
    """Draw learning curves as PNG with a CSV beside it; `options` are those of `draw`."""
    draw([runs] if isinstance(runs, str | Path) else runs, path, **options)
    return Path(path)


def draw(
    runs: Sequence[str | Path],
    path: str | Path,
    *,
    metric: str | None = None,
    x: Axis = "env_steps",
    smooth: int = 1,
    threshold: float | None = None,
) -> list[Curve]:
    """Write the PNG and the CSV, and return the curves.

    Args:
        runs: folders of runs; those that differ only in their seed become a mean with a band.
        path: the PNG to write; the CSV has the same name.
        metric: column of `metrics.csv` to draw; default: that of `default_metric`.
        x: horizontal axis: `env_steps`, `wall_s` or `episodes`.
        smooth: number of rows whose mean is drawn at each row.
        threshold: value to mark by a line, such as the return at which a task counts as solved.
    """
    path = Path(path)
    if not runs:
        raise UserError("A plot needs at least one run.")
    if path.suffix.lower() != ".png":
        raise UserError(f"A plot must end in .png, got {path}.")
    if smooth < 1:
        raise UserError(f"smooth must be at least 1, got {smooth}.")
    if threshold is not None and not math.isfinite(threshold):
        raise UserError(f"threshold must be a finite number, got {threshold:g}.")
    if path.stem == "metrics" and (path.parent / "run.json").exists():
        raise UserError(f"{path} would replace the run's own metrics.csv: give another name.")
    metric = default_metric(runs) if metric is None else metric_name(metric)
    found = curves([Path(run) for run in runs], metric, x, smooth)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_png(found, path, metric, x, smooth, threshold)
        save_csv(found, path.with_suffix(".csv"), metric, x)
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be written: {error.strerror}.") from error
    return found


def default_metric(runs: Sequence[str | Path]) -> str:
    """The return in evaluations, or of training episodes if a run has fewer than two evaluations."""
    for run in runs:
        found = read_metrics(RunFolder.open(run).metrics_csv).get("eval/return")
        if found is None or np.isfinite(found).sum() < 2:
            return "train/return"
    return "eval/return"


def curves(paths: Sequence[Path], metric: str, axis: Axis = "env_steps", smooth: int = 1) -> list[Curve]:
    """One curve per configuration; each row of a run is the mean of its last `smooth` rows."""
    groups: dict[str, list[RunFolder]] = {}
    for path in {Path(path).resolve(): path for path in paths}.values():
        folder = RunFolder.open(path)
        groups.setdefault(repr(sorted(_settings(folder.config).items())), []).append(folder)
    labels = _labels([folders[0] for folders in groups.values()])
    return [
        _curve(label, folders[0].env, [_line(folder, metric, axis, smooth) for folder in folders])
        for label, folders in zip(labels, groups.values(), strict=True)
    ]


def save_csv(found: Sequence[Curve], path: Path, metric: str, axis: Axis) -> None:
    """Write the curves as CSV, one row per curve and x."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["curve", axis, f"{metric} mean", "lowest", "highest", "runs"])
        for c in found:
            for row in zip(c.x, c.mean, c.low, c.high, c.count, strict=True):
                writer.writerow([c.label, *(f"{value:.10g}" for value in row)])


def save_png(
    found: Sequence[Curve], path: Path, metric: str, axis: Axis, smooth: int = 1, threshold: float | None = None
) -> None:
    """Draw the curves; UserError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("Drawing needs matplotlib: pip install 'corral-rl[plot]'.") from error

    inside = len(found) <= 6
    columns = 1 if inside else 2 if max(len(curve.label) for curve in found) > 20 else 4
    height = 4.8 if inside else 4.8 + 0.25 * math.ceil(len(found) / columns)
    figure = Figure(figsize=(8, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    scale, unit = _x_unit(found, axis)
    for i, curve in enumerate(found):
        _draw(axes, curve, scale, _COLOURS[i % len(_COLOURS)], "-" if i < len(_COLOURS) else "--")
    if threshold is not None:
        label = f"threshold {threshold:g}"
        axes.axhline(threshold, color="#4d4d4d", linestyle=":", linewidth=1.4, label=label)
    _style_axes(axes, unit, _TITLES.get(metric, metric))
    if inside:
        axes.legend(frameon=True, framealpha=0.8, edgecolor="none", fontsize=10)
    else:
        figure.legend(loc="outside lower center", frameon=False, fontsize=9, ncols=columns)
    if len({curve.env for curve in found}) == 1:
        axes.set_title(found[0].env, loc="left", fontsize=12, fontweight="bold")
    notes = ["mean over seeds, band from lowest to highest"] if any(curve.runs > 1 for curve in found) else []
    notes += [f"smoothed over {smooth} rows"] if smooth > 1 else []
    axes.set_title("; ".join(notes), loc="right", fontsize=9, color="#666666")
    figure.savefig(path, dpi=150)


def _line(folder: RunFolder, metric: str, axis: Axis, smooth: int) -> tuple[Array, Array]:
    columns = read_metrics(folder.metrics_csv)
    if not columns:
        raise UserError(f"{folder.path} has no rows yet: plot it when it has trained for a while.")
    for name in (metric, _COLUMN[axis]):
        if name not in columns:
            raise UserError(f"{folder.path} has no metric {name!r}; {_nearest(name, columns)}")
    x, y = _filled(columns[_COLUMN[axis]], columns["env_steps"]), columns[metric]
    there = np.isfinite(x) & np.isfinite(y)
    if not there.any():
        raise UserError(f"{folder.path} has no value of {metric!r} yet: plot it when it has trained for a while.")
    x, y = x[there], _smoothed(y[there], smooth)
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    last = np.append(np.diff(x) > 0, True)  # of rows at the same x, the last
    return x[last], y[last]


def _filled(x: Array, steps: Array) -> Array:
    """Values of the axis, interpolated in rows of evaluations in the background, which have only their steps."""
    known = np.isfinite(x)
    if known.all() or not known.any():
        return x
    order = np.argsort(steps[known], kind="stable")
    filled: Array = np.where(known, x, np.interp(steps, steps[known][order], x[known][order]))
    return filled


def _nearest(name: str, columns: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, columns, 3, 0.4)
    close += [other for other in columns if name.rpartition("/")[2] in other and other not in close]
    if close:
        return f"the nearest are {', '.join(close[:3])}."
    return f"it has {', '.join(columns)}."


def _smoothed(y: Array, window: int) -> Array:
    total = np.cumsum(np.insert(y, 0, 0.0))
    end = np.arange(1, len(y) + 1)
    start = np.maximum(end - window, 0)
    return y if window <= 1 else (total[end] - total[start]) / (end - start)


def _settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings by dotted name, without those that may differ within a curve."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if not prefix and key in _NOT_COMPARED:
            continue
        if isinstance(value, Mapping):
            found |= _settings(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _labels(folders: Sequence[RunFolder]) -> list[str]:
    """Algorithm, environment if they differ, and the settings that distinguish the curves of a pair."""
    same_env = len({folder.env for folder in folders}) == 1
    labels = []
    for folder in folders:
        peers = [_settings(f.config) for f in folders if (f.algo, f.env) == (folder.algo, folder.env)]
        own = _settings(folder.config)
        differing = [name for name in own if any(peer.get(name) != own[name] for peer in peers)]
        parts = [folder.algo if same_env else f"{folder.algo} {folder.env}"]
        parts += [f"{name.rpartition('.')[2]}={own[name]}" for name in differing[:3]]
        labels.append(" ".join(parts))
    return [f"{label} #{labels[:i].count(label) + 1}" if labels.count(label) > 1 else label
            for i, label in enumerate(labels)]  # fmt: skip


def _curve(label: str, env: str, lines: Sequence[tuple[Array, Array]]) -> Curve:
    """Mean and range of the runs at every x that at least half of them have reached."""
    if len(lines) == 1:
        x, y = lines[0]
        return Curve(label, env, 1, x, y, y, y, np.ones(len(x)))
    x = np.unique(np.concatenate([x for x, _ in lines]))
    if len(x) > _MAX_POINTS:
        x = np.linspace(x[0], x[-1], _MAX_POINTS)
    values = np.stack([np.interp(x, *line, left=np.nan, right=np.nan) for line in lines])
    count = np.isfinite(values).sum(0)
    there = 2 * count >= len(lines)
    x, values, count = x[there], values[:, there], count[there]
    return Curve(label, env, len(lines), x, np.nanmean(values, 0), np.nanmin(values, 0), np.nanmax(values, 0), count)


def _x_unit(found: Sequence[Curve], axis: Axis) -> tuple[float, str]:
    if axis != "wall_s":
        return 1.0, "environment steps" if axis == "env_steps" else "episodes"
    longest = max(float(curve.x.max(initial=0.0)) for curve in found)
    for scale, name in ((3600.0, "hours"), (60.0, "minutes")):
        if longest >= 3 * scale:
            return scale, f"wall time ({name})"
    return 1.0, "wall time (seconds)"


def _draw(axes: Any, curve: Curve, scale: float, colour: str, style: str) -> None:
    label = f"{curve.label} ({curve.runs} seeds)" if curve.runs > 1 else curve.label
    marker = "o" if len(curve.x) <= 40 else ""
    axes.plot(
        curve.x / scale, curve.mean, style, color=colour, linewidth=1.8, marker=marker, markersize=3.5, label=label
    )
    if curve.runs > 1:
        axes.fill_between(curve.x / scale, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)


def _style_axes(axes: Any, x_label: str, y_label: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(x_label, fontsize=11)
    axes.set_ylabel(y_label, fontsize=11)
    axes.tick_params(labelsize=10)
    axes.margins(x=0.02)
    if not x_label.startswith("wall"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)
    # With zero: an axis from the lowest to the highest value makes noise look like progress.
    low, high = axes.get_ylim()
    margin = 0.03 * (max(high, 0.0) - min(low, 0.0))
    axes.set_ylim(low - margin if low < 0 else 0.0, high + margin if high > 0 else 0.0)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
