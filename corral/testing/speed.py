"""How fast an environment or an external simulator steps on this machine, and where the time of a step goes.

The time of a layer is the difference between configurations of the same environment: alone, in a `local` VecEnv, in
worker processes. All configurations take short turns, so that a drift in machine speed affects them equally.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from corral.core.errors import EnvFailed, UserError
from corral.core.gym_env import build_env, seeded_reset, unpack_step
from corral.core.machine import cores
from corral.core.types import Array, EnvSpec
from corral.envs.backends.simulators.options import is_url
from corral.envs.backends.simulators.vec_env import LinkVecEnv
from corral.envs.make import make_vec
from corral.envs.resolve import resolve
from corral.envs.supervision import Supervision
from corral.envs.vec_env import VecEnv

ENVIRONMENT, CORRAL, IPC, WIRE = "environment", "Corral", "IPC", "wire"
"""Layers: step and reset; Corral's stepping, checks and copies; messages between processes; messages of the link."""

_TURNS = 3
_DRAWN = 64
_SIZES = (8, 64)
_LINK_ENVS = 8
_SLOW_BATCH_S = 0.25  # slower steps of a whole batch leave too few of them to measure
_START_S = 60.0
_WAITING_SHARE = 0.5  # CPU share of a step; below it, an environment waits for something else
_SHORT_STEP_US = 1e3
_GOOD_ENOUGH = 0.85  # of the fastest rate


@dataclass
class Measurement:
    """A configuration: `backend`, number of environments and workers; and its measured times."""

    backend: str
    num_envs: int
    workers: int = 1
    turns: list[tuple[int, float, float]] = field(default_factory=list)  # steps, seconds, CPU seconds
    layers: dict[str, float] = field(default_factory=dict)  # microseconds per step
    faults: int = 0  # failed steps, which do not count as steps

    @property
    def step_us(self) -> float:
        """Median wall time of one step of one environment, in microseconds."""
        return 1e6 * statistics.median(seconds / steps if steps else math.inf for steps, seconds, _ in self.turns)

    @property
    def cpu_us(self) -> float:
        return 1e6 * statistics.median(cpu / steps if steps else math.inf for steps, _, cpu in self.turns)

    @property
    def rate(self) -> float:
        return 1e6 / self.step_us


@dataclass
class Speed:
    """The measured configurations, and why others are missing."""

    env: str
    measurements: list[Measurement]
    not_measured: dict[str, str] = field(default_factory=dict)
    waits: bool = False  # whether a step mostly waits for something other than this machine's CPU

    @property
    def best(self) -> Measurement:
        """The fastest; among similar ones, the one with the fewest environments and workers. `native` is excluded,
        because EnvPool and ALE have their own versions of an environment.
        """
        found = [each for each in self.measurements if each.backend in ("local", "process", "link")]
        fastest = max(each.rate for each in found)
        good = [each for each in found if each.rate > _GOOD_ENOUGH * fastest]
        return min(good, key=lambda each: (each.num_envs, each.workers, -each.rate))


Run = Callable[[], tuple[int, int]]  # steps all environments once; returns the numbers of steps and of faults


def measure_speed(
    env: str, env_kwargs: Mapping[str, Any], seconds: float, num_envs: int | None, workers: int | None
) -> Speed:
    """Step `env`, a Gymnasium id, `module:Class` or URL, for about `seconds`, not counting the time to build it."""
    with contextlib.ExitStack() as stack:
        if is_url(env):
            return _measure_link(env, env_kwargs, seconds, num_envs, stack)
        return _measure_backends(env, env_kwargs, seconds, num_envs, workers, stack)


# Environments in Python.


def _measure_backends(
    env: str, kwargs: Mapping[str, Any], seconds: float, num_envs: int | None, workers: int | None,
    stack: contextlib.ExitStack,
) -> Speed:  # fmt: skip
    alone, build_s = Measurement("none", 1), time.perf_counter()
    step_alone = _bare(env, kwargs, stack)
    build_s = time.perf_counter() - build_s
    before = _voluntary_switches()
    _turn(alone, step_alone, min(0.2, seconds / 10))
    after = _voluntary_switches()
    # On a busy machine the process also loses the CPU, but not voluntarily.
    gave_up = before is None or after is None or after - before >= _WAITING_SHARE * alone.turns[0][0]
    waits = gave_up and alone.step_us > _SHORT_STEP_US and alone.cpu_us < _WAITING_SHARE * alone.step_us
    sizes = [num_envs] if num_envs else _sizes(alone.step_us, build_s, seconds)
    speed = Speed(env, [alone], waits=waits)
    runs = [step_alone]
    for size in sizes:
        counts = {workers or min(cores(), size), *([size] if waits and not workers else [])}
        for backend, count in (("local", 1), *(("process", count) for count in sorted(counts)), ("native", cores())):
            try:
                vec = stack.enter_context(make_vec(env, size, backend, count, env_kwargs=kwargs))
                runs.append(_lockstep(vec, vec.recv().env_ids))
                speed.measurements.append(Measurement(backend, size, count))
            except (UserError, ImportError) as error:
                if backend != "native":
                    raise
                speed.not_measured[backend] = str(error)
    alone.turns.clear()
    _take_turns(list(zip(speed.measurements, runs, strict=True)), seconds)
    for measured in speed.measurements:
        measured.layers = _layers(measured, speed)
    return speed


def _voluntary_switches() -> int | None:
    try:
        import resource
    except ImportError:  # Windows does not count them
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def _sizes(step_us: float, build_s: float, seconds: float) -> list[int]:
    """Numbers of environments that can be built and stepped in the given time."""
    return [n for n in _SIZES if n * build_s < seconds and n * step_us * 1e-6 < _SLOW_BATCH_S] or [min(_SIZES)]


def _layers(measured: Measurement, speed: Speed) -> dict[str, float]:
    """Workers share the environment's and Corral's time of a step; the rest is communication."""
    alone = speed.measurements[0].step_us
    if measured.backend == "none":
        return {ENVIRONMENT: alone}
    if measured.backend == "native":
        return {}
    if measured.backend == "local":
        return {ENVIRONMENT: min(alone, measured.step_us), CORRAL: max(0.0, measured.step_us - alone)}
    peers = [other for other in speed.measurements if other.num_envs == measured.num_envs]
    local = next(other for other in peers if other.backend == "local")
    share = measured.workers if speed.waits else min(measured.workers, cores())
    inside = {ENVIRONMENT: alone / share, CORRAL: max(0.0, local.step_us - alone) / share}
    return {**inside, IPC: max(0.0, measured.step_us - sum(inside.values()))}


def _bare(name: str, kwargs: Mapping[str, Any], stack: contextlib.ExitStack) -> Run:
    env, spec = build_env(resolve(name, kwargs).factory, name)
    stack.callback(_close_quietly, env)
    _, info = seeded_reset(env, 0)
    if isinstance(info, dict) and "action_mask" in info:
        raise UserError(f"{name} has an action mask, but `corral bench` takes random actions, legal or not.")
    actions = itertools.cycle(_draw(spec, _DRAWN))

    def step() -> tuple[int, int]:
        try:
            _, _, terminated, truncated, _ = unpack_step(env.step(next(actions)), name)
            if terminated or truncated:
                env.reset()
        except UserError:
            raise
        except Exception as error:
            raise EnvFailed(f"{name} raised {error!r} in a step; `corral check-env {name}` shows where.") from error
        return 1, 0

    return step


def _close_quietly(env: Any) -> None:
    with contextlib.suppress(Exception):
        env.close()


def _draw(spec: EnvSpec, count: int) -> list[Any]:
    spec.action_space.seed(0)
    return [spec.action_space.sample() for _ in range(count)]


def _lockstep(vec: VecEnv, ids: Array) -> Run:
    """All environments step, then get their next actions, which are drawn beforehand."""
    drawn = _draw(vec.spec, _DRAWN)
    chosen = ([drawn[(first + k) % _DRAWN] for k in range(len(ids))] for first in range(_DRAWN))
    actions = itertools.cycle(list(map(vec.spec.action.stack, chosen)))

    def step() -> tuple[int, int]:
        vec.send(ids, next(actions))
        faults = int(vec.recv().faulty.sum())
        return len(ids) - faults, faults

    return step


# External simulators.


def _measure_link(
    url: str, kwargs: Mapping[str, Any], seconds: float, num_envs: int | None, stack: contextlib.ExitStack
) -> Speed:
    supervision = Supervision(start_timeout_s=_START_S)

    def connect(count: int) -> LinkVecEnv:
        vec = stack.enter_context(make_vec(url, count, env_kwargs=kwargs, supervision=supervision))
        assert isinstance(vec, LinkVecEnv)
        return vec

    vec, speed = connect(num_envs or 1), Speed(url, [])
    if num_envs is None:
        room = sum(session.simulator.hello.slots for session in vec.fleet.sessions.values())
        if room > 1:
            vec = connect(min(_LINK_ENVS, room - 1))  # the first one keeps its slot, so that simulators stay
        else:
            speed.not_measured["more environments"] = "the simulator has one slot."
    ids = vec.recv().env_ids
    for count in dict.fromkeys((1, vec.num_envs)):
        measured = Measurement("link", count)
        # One after the other: sessions report an average over their latest steps.
        _take_turns([(measured, _lockstep(vec, ids[:count]))], seconds / len({1, vec.num_envs}))
        own = min(measured.cpu_us, measured.step_us)
        simulator = min(_simulator_us(vec), measured.step_us - own)
        measured.layers = {ENVIRONMENT: simulator, CORRAL: own, WIRE: max(0.0, measured.step_us - own - simulator)}
        speed.measurements.append(measured)
    return speed


def _simulator_us(vec: LinkVecEnv) -> float:
    sessions = vec.fleet.sessions.values()
    return 1e6 * statistics.fmean(session.row_s for session in sessions) / len(sessions) if sessions else 0.0


def _take_turns(runs: Sequence[tuple[Measurement, Run]], seconds: float) -> None:
    each = seconds / len(runs) / (_TURNS + 0.5)
    for measured, run in runs:
        _turn(measured, run, each / 2)  # warm up caches and branch predictors
        measured.turns.clear()
    with _no_collections():
        for _ in range(_TURNS):
            for measured, run in runs:
                _turn(measured, run, each)


def _turn(measured: Measurement, run: Run, seconds: float) -> None:
    steps, cpu, start = 0, time.process_time(), time.perf_counter()
    while True:
        made, faults = run()
        steps += made
        measured.faults += faults
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            break
    measured.turns.append((steps, elapsed, time.process_time() - cpu))


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which would slow down the configuration that is running."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
