"""`corral bench`: the step rate of an environment or simulator on this machine, its bottleneck, and the remedy."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from corral.cli.options import EnvKwargs, EnvOrUrl, JsonFile, OptionalCount, Seconds, parse_env_kwargs
from corral.core.errors import UserError
from corral.core.log import log_level

if TYPE_CHECKING:
    from corral.testing.speed import Measurement, Speed

_MAX_SECONDS = 3600.0


@dataclass(frozen=True)
class Bench:
    """Measure environment steps per second with every backend or over the link, and where the time of a step goes."""

    env: EnvOrUrl
    env_kwargs: EnvKwargs = ()
    num_envs: OptionalCount = None
    """Number of environments. Default: 8 and 64, if they can be built in time; for a URL 1 and 8."""
    workers: OptionalCount = None
    """Worker processes. Default: one per core; also one per environment if the environment mostly waits."""
    seconds: Seconds = 10.0
    """Total measuring time of all backends, not counting the time to build the environments."""
    json: JsonFile = None

    def run(self) -> int:
        for name, count in (("--num-envs", self.num_envs), ("--workers", self.workers)):
            if count is not None and count < 1:
                raise UserError(f"{name} must be at least 1, got {count}.")
        if not 0 < self.seconds <= _MAX_SECONDS:
            raise UserError(f"--seconds must be positive and at most {_MAX_SECONDS:g}, got {self.seconds:g}.")
        if self.json is not None and not os.access(self.json.parent, os.W_OK):
            raise UserError(f"The results cannot be written to {self.json}: choose a folder that exists.")
        from corral.cli.console import write_json
        from corral.testing.speed import measure_speed

        kwargs = parse_env_kwargs(self.env_kwargs)
        with log_level("corral", logging.WARNING):  # the table shows the backends
            speed = measure_speed(self.env, kwargs, self.seconds, self.num_envs, self.workers)
        _print_table(speed)
        for name, why in speed.not_measured.items():
            print(f"Not measured: {name}: {why}")
        print(f"Bottleneck: {bound(speed)}\nSuggestion: {advice(speed)}")
        if self.json is not None:
            found = [asdict(each) | {"steps_per_s": each.rate, "step_us": each.step_us} for each in speed.measurements]
            report = {"env": self.env, "bound": bound(speed), "change": advice(speed), "measurements": found}
            write_json(self.json, report)
        return 0


def _print_table(speed: Speed) -> None:
    from rich.table import Table

    from corral.cli.console import make_console

    columns = list(dict.fromkeys(layer for each in speed.measurements for layer in each.layers))
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("backend")
    for title in ("environments", "steps/s", "us/step", *columns):
        table.add_column(title, justify="right")
    for each in speed.measurements:
        layers = [f"{each.layers[name]:.1f}" if name in each.layers else "" for name in columns]
        table.add_row(_name(each), str(each.num_envs), f"{each.rate:,.0f}", f"{each.step_us:.1f}", *layers)
    make_console().print(table)
    for each in speed.measurements:
        if each.faults:
            print(
                f"Faults: {_name(each)}, {each.num_envs} environments: {each.faults:,} steps failed and do not count."
            )


def _name(measured: Measurement) -> str:
    if measured.backend == "none":
        return "the environment alone"
    if measured.backend == "process":
        return f"process, {measured.workers} worker{'s' if measured.workers > 1 else ''}"
    return "over the link" if measured.backend == "link" else measured.backend


def bound(speed: Speed) -> str:
    """The largest component of a step in the fastest configuration."""
    from corral.core.machine import cores
    from corral.testing.speed import CORRAL, ENVIRONMENT, IPC

    best = speed.best
    layer = max(best.layers, key=lambda name: best.layers[name])
    share = f"{best.layers[layer]:.1f} of {best.step_us:.1f} us per step"
    if layer == ENVIRONMENT and best.backend == "link":
        return f"the simulator's own step, {share}."
    if layer == ENVIRONMENT and speed.waits:
        return f"the environment, {share}; it mostly waits, so more workers than cores help."
    if layer == ENVIRONMENT and best.backend == "process":
        return f"the environment itself on {min(best.workers, cores())} of {cores()} cores, {share}."
    if layer == ENVIRONMENT:
        return f"the environment itself, {share}{_gain_of_processes(speed)}."
    if layer == CORRAL:
        return f"Corral's stepping, checks and copies, {share}; the environment's step takes less."
    if layer == IPC:
        return f"messages between processes, {share}."
    return f"the link, messages and waiting for them, {share}."


def _gain_of_processes(speed: Speed) -> str:
    """What the rates say about worker processes, where a local backend was chosen."""
    gain = max((each.rate for each in speed.measurements if each.backend == "process"), default=0.0) / speed.best.rate
    if not gain:
        return ""
    return (
        "; worker processes cost more than they gain here" if gain <= 1 else f"; worker processes gain {gain - 1:.0%}"
    )


def advice(speed: Speed) -> str:
    """The settings of the fastest configuration, and their gain."""
    from corral.testing.speed import ENVIRONMENT, WIRE

    best, first = speed.best, next(each for each in speed.measurements if each.backend != "none")
    if best.backend == "link":
        most = max(each.num_envs for each in speed.measurements)
        more = f"num_envs={4 * most}, if the simulator has that many slots"
        layer = max(best.layers, key=lambda name: best.layers[name])
        if layer == WIRE:
            return f"--set {more}: environments of one simulator share a message."
        gain = _gain(best, first, "one environment")
        remedy = "more simulators make it faster" if layer == ENVIRONMENT else "the link is not the bottleneck"
        return f"--set num_envs={best.num_envs}{gain}; {remedy}."
    settings = f"backend={best.backend} " + (f"workers={best.workers} " if best.backend == "process" else "")
    native = max((each.rate for each in speed.measurements if each.backend == "native"), default=0.0)
    times = f" backend=native, a different implementation, is {native / best.rate:.1f} times as fast."
    hint = times if native > best.rate else ""
    return f"--set {settings}num_envs={best.num_envs}{_gain(best, first, f'local with {first.num_envs}')}.{hint}"


def _gain(best: Measurement, first: Measurement, name: str) -> str:
    return "" if best is first else f", {best.rate / first.rate:.1f} times the rate of {name}"
