"""What `python -m benchmarks link` compares: ways to step environments in a simulator process over loopback.

The learner is Python. The simulator only answers (`noop.cpp`), so the measurement is the cost of communication.
"""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.contestants import draw_actions, timed
from benchmarks.common.report import LayerRow, Scale, Verdict
from benchmarks.common.rounds import Contestant, Entry, Outcome, Slice, Spread
from benchmarks.link.peers import Bare, GrpcUnary, ReqRep
from benchmarks.link.sims import SHAPES, Noop, SimulatorProcess, free_port, python_command
from corral.core.errors import RunFailed
from corral.core.types import Array

TCP, ZMQ, GRPC = "corral tcp", "corral zmq", "corral grpc, Python simulator"
BARE = "bare TCP, the same bytes"
JSON, JSON_PYTHON = "REQ/REP + JSON", "REQ/REP + JSON, Python simulator"
UNARY = "gRPC + protobuf, Python simulator"
RLLINK_STEPS = 32
RLLINK = f"RLlib RLlink, {RLLINK_STEPS} steps at a time"
COLUMNS = ("Python", "system calls", "simulator", "wake-ups")
SCALE = Scale(
    "python -m benchmarks link", "rows per second", JSON, "microseconds per row and layer", COLUMNS, "contestant"
)

_THOUSANDS = "thousand rows per second"
_RPC = "pip install 'corral-rl[grpc]' protobuf"
_RLLIB = "pip install 'corral-rl[rllib]' msgpack-numpy"
_SINGLE, _SIMS, _MANY, _ROWS, _IMAGES = "single", "sims", "many", "rows", "images"
CASES: dict[str, tuple[str, int, str, int]] = {
    _SINGLE: ("1 environment of 4 floats", 1, "f4", 1),
    _SIMS: ("8 simulators of 1 environment", 8, "f4", 8),
    _MANY: ("64 environments of 4 floats", 64, "f4", 1),
    _ROWS: ("256 environments of 84 floats", 256, "f84", 1),
    _IMAGES: ("32 environments of 84 x 84 x 4 bytes", 32, "image", 1),
}
"""By name: title, number of environments, kind of observation, and number of simulators."""


@dataclass
class Meter:
    """Totals over the slices of a contestant, except for the first, which is its warm-up."""

    slices: int = 0
    rows: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of the learner's thread."""
    work_s: float = 0.0
    """Work time that the simulator reports."""

    def add(self, done: Slice, cpu_s: float, row_s: float) -> None:
        self.slices += 1
        if self.slices > 1:
            self.rows += done.steps
            self.wall_s += done.seconds
            self.cpu_s += cpu_s
            self.work_s += row_s * done.steps

    def per_row(self, seconds: float) -> float:
        """Microseconds per row; NaN if nothing was measured."""
        return 1e6 * seconds / self.rows if self.rows else float("nan")

    @property
    def overhead_us(self) -> float:
        """Time per row without the simulator's work."""
        return self.per_row(self.wall_s - self.work_s)


class MeteredContestant:
    """Steps all environments, together or one by one, and records the time in a meter."""

    def __init__(
        self, stepper: Any, actions: Iterator[Array], num_envs: int, meter: Meter, row_s: Callable[[], float] = float
    ):
        self._step: Callable[[Array], None] = stepper.step
        self.close: Callable[[], None] = stepper.close
        self._actions, self._num_envs, self._meter, self._row_s = actions, num_envs, meter, row_s

    def run(self, seconds: float) -> Slice:
        before = time.thread_time()
        done = timed(self._turn, seconds)
        self._meter.add(done, time.thread_time() - before, self._row_s())
        return done

    def _turn(self) -> int:
        self._step(next(self._actions))
        return self._num_envs


class Linked:
    """Corral's VecEnv over simulators that connect."""

    def __init__(self, scheme: str, kind: str, num_envs: int, simulators: int, command: Callable[..., list[str]]):
        from corral.envs.make import make_vec

        url = f"{scheme}://127.0.0.1:{free_port()}"
        self._processes = [SimulatorProcess(command("link", url), kind) for _ in range(simulators)]
        try:
            self._vec: Any = make_vec(url, num_envs, workers=simulators)
            self._ids = self._vec.recv().env_ids
        except BaseException:
            self._end()
            raise

    def step(self, actions: Array) -> None:
        self._vec.send(self._ids, actions)
        self._vec.recv()

    def row_s(self) -> float:
        """Seconds per row that the simulators report, divided by their number."""
        sessions = self._vec.fleet.sessions.values()
        return float(np.mean([session.row_s for session in sessions])) / len(sessions)

    def close(self) -> None:
        self._vec.close()
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.close()


class RlLink:
    """RLlib's learner and simulator, both in other processes: `rllink.py`."""

    def __init__(self, num_envs: int):
        for name in ("ray.rllib.env.external.rllink", "msgpack_numpy"):
            importlib.import_module(name)
        script = Path(__file__).with_name("rllink.py")
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL,
        }  # fmt: skip
        self._process = SimulatorProcess([sys.executable, str(script), str(num_envs), str(RLLINK_STEPS)], **pipes)

    def run(self, seconds: float) -> Slice:
        stdin, stdout = self._process.popen.stdin, self._process.popen.stdout
        assert stdin is not None
        assert stdout is not None
        print(seconds, file=stdin, flush=True)
        answer = stdout.readline().split()
        if len(answer) != 2:
            raise RunFailed("RLlib's server has ended.")
        return Slice(int(answer[0]), float(answer[1]))

    def close(self) -> None:
        """End both: the learner ends the simulator when its stdin is closed."""
        if self._process.popen.stdin is not None:
            self._process.popen.stdin.close()
        self._process.close()


@dataclass(frozen=True)
class LinkCase:
    """One comparison."""

    name: str
    title: str
    num_envs: int
    kind: str
    entries: Sequence[Entry]
    meters: dict[str, Meter]
    ideal: float | None = field(default=None, init=False)
    scale: Scale = field(default=SCALE, init=False)

    @property
    def label(self) -> str:
        return self.title

    def base(self, outcome: Outcome) -> str:
        """REQ/REP with JSON, which users write themselves."""
        return JSON

    def layers(self, outcome: Outcome) -> list[LayerRow]:
        """Where the time of a row goes: the learner's CPU time with and without Corral, the simulator, and waiting."""
        bare, rows = self.meters.get(BARE), []
        for name in (TCP, ZMQ):
            meter = self.meters.get(name)
            if name not in outcome.rates or not meter or not meter.rows or not bare or not bare.rows:
                continue
            total, cpu, calls = meter.per_row(meter.wall_s), meter.per_row(meter.cpu_s), bare.per_row(bare.cpu_s)
            work = meter.per_row(meter.work_s)
            parts = dict(zip(COLUMNS, (cpu - calls, calls, work, max(0.0, total - cpu - work)), strict=True))
            rows.append(LayerRow(name, {part: Spread.of([value]) for part, value in parts.items()}, Spread.of([total])))
        return rows

    def verdicts(self, outcome: Outcome, layers: Sequence[LayerRow]) -> list[Verdict]:
        """The targets of this case; none if their contestants were skipped."""
        if TCP not in outcome.rates:
            return []
        bound = self._bound(outcome, layers)
        if self.name in (_SINGLE, _SIMS):
            return [Verdict(self.title, 12.0, _thousands(outcome, TCP), TCP, bound, _THOUSANDS)]
        if self.name == _ROWS:
            return [Verdict(self.title, 300.0, _thousands(outcome, TCP), TCP, bound, _THOUSANDS)]
        if self.name == _MANY and JSON in outcome.rates:
            return [Verdict(f"{self.title}, {TCP} over {JSON}", 10.0, outcome.ratio(TCP, JSON), TCP, bound)]
        return []

    def _bound(self, outcome: Outcome, layers: Sequence[LayerRow]) -> str:
        texts = []
        if BARE in outcome.rates:
            texts.append(f"Bound: {BARE} reaches {_thousands(outcome, BARE).median:,.1f} {_THOUSANDS}")
        for row in layers[:1]:
            total, most = (value.median * self.num_envs for value in (row.total, row.layers[row.largest]))
            texts.append(f"a step of all environments takes {total:.0f} us, mostly {row.largest} ({most:.0f} us)")
        return "; ".join(texts) + "." if texts else ""


def make_cases(names: Sequence[str], noop: Noop) -> list[LinkCase]:
    """The cases to run."""
    return [_make_case(name, noop) for name in names]


def _make_case(name: str, noop: Noop) -> LinkCase:
    title, n, kind, sims = CASES[name]
    meters: dict[str, Meter] = {}

    def metered(name: str, make: Callable[[], Any]) -> Contestant:
        stepper = make()
        meter = meters[name] = Meter()
        return MeteredContestant(stepper, draw_actions(2, n), n, meter, getattr(stepper, "row_s", float))

    def entry(name: str, our: bool, make: Callable[[], Any], needs: str = "") -> Entry:
        return Entry(name, "corral" if our else "peer", partial(metered, name, make), needs)

    entries = [
        entry(TCP, True, partial(Linked, "tcp", kind, n, sims, noop.command)),
        entry(ZMQ, True, partial(Linked, "zmq", kind, n, sims, noop.command)),
    ]
    if kind == "f4":
        entries.append(entry(JSON, False, partial(ReqRep, n, sims, noop.command)))
    if kind == "f4" and sims == 1:
        entries += [
            entry(GRPC, True, partial(Linked, "grpc", kind, n, sims, python_command), _RPC),
            entry(JSON_PYTHON, False, partial(ReqRep, n, sims, python_command)),
            entry(UNARY, False, partial(GrpcUnary, n), _RPC),
        ]
    if name == _MANY:
        entries.append(Entry(RLLINK, "peer", partial(RlLink, n), _RLLIB))
    bare = partial(metered, BARE, partial(Bare, noop, sims, *message_sizes(kind, n // sims)))
    entries.append(Entry(BARE, "bound", bare))
    return LinkCase(name, title, n, kind, entries, meters)


def message_sizes(kind: str, num_envs: int) -> tuple[int, int]:
    """Bytes of a STEP and of its answer over `tcp://`."""
    from corral.link.layout import RowsLayout
    from corral.link.protocol import HEADER

    dtype, shape = SHAPES[kind]
    head = 8 + 3 * 4 + HEADER.size  # of three frames each
    rows = RowsLayout(1, True).group().size(num_envs)
    return head + (4 + 8) * num_envs, head + rows + num_envs * math.prod(shape) * np.dtype(dtype).itemsize


def _thousands(outcome: Outcome, name: str) -> Spread:
    return Spread.of(rate / 1000 for rate in outcome.rates[name])
