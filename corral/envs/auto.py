"""`backend="auto"`: measure the time of a step, choose a backend, and report why."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from corral.core.gym_env import EnvFactory, build_env, explained, legal, seeded_reset, unpack_step
from corral.envs.supervision import Supervision, Watchdog, starting

_ROUNDS = 4
_ROUND_S, _SPIN_S = 0.05, 0.02
_ROUND_STEPS = 500
# Overhead per step of a whole batch in worker processes: messages, wake-ups and cold caches.
_PROCESS_BATCH_S = 300e-6
# Minimum gain before worker processes are chosen, so that noise does not decide.
_CLEAR_GAIN = 0.8
_WAIT_S = 1e-3
# Below this CPU share of its step time, an environment mostly waits for something other than the CPU.
_WAITING_SHARE = 0.5


@dataclass(frozen=True)
class StepCost:
    """Wall-clock and CPU seconds per step of one environment, on a core of its own."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Choice:
    """A backend, its number of workers, and the reason as text."""

    backend: str
    workers: int
    why: str


def measure(factory: EnvFactory, name: str, supervision: Supervision, *, only_waiting: bool = False) -> StepCost | None:
    """Step one environment with random actions for 0.2 s; None if its steps fail.

    With `only_waiting`, a quarter of that if it turns out not to wait.

    Time for which other processes have the core is not waiting: a loop that only computes measures how much that is.
    """
    env, spec = build_env(factory, name)
    mark = [starting(0)]
    watchdog = Watchdog(mark, supervision)
    try:
        with explained(f"{name} cannot be reset"):
            _, info = seeded_reset(env, 0)
        mark[0] = 0
        spec.action_space.seed(0)
        actions = [spec.action_space.sample() for _ in range(64)]
        wall_s = cpu_s = spin_wall_s = spin_cpu_s = 0.0
        steps = 0
        for _ in range(_ROUNDS):
            wall, cpu, first = time.perf_counter(), time.process_time(), steps
            while steps - first < _ROUND_STEPS and time.perf_counter() - wall < _ROUND_S:
                try:
                    result = env.step(legal(actions[steps % 64], info))
                except Exception:
                    return None  # the backend handles the fault
                _, _, terminated, truncated, info = unpack_step(result, name)
                steps += 1
                if terminated or truncated:
                    try:
                        _, info = env.reset()
                    except Exception:
                        return None
            wall_s, cpu_s = wall_s + time.perf_counter() - wall, cpu_s + time.process_time() - cpu
            if only_waiting and wall_s < _WAIT_S * steps:
                return StepCost(wall_s / steps, cpu_s / steps)
            wall, cpu = time.perf_counter(), time.thread_time()
            while time.perf_counter() - wall < _SPIN_S:
                pass
            spin_wall_s, spin_cpu_s = spin_wall_s + time.perf_counter() - wall, spin_cpu_s + time.thread_time() - cpu
        shared = max(1.0, spin_wall_s / max(spin_cpu_s, 1e-9))  # wall-clock seconds for a second of computing
        waiting_s = max(0.0, wall_s - shared * cpu_s)
        return StepCost((cpu_s + waiting_s) / steps, cpu_s / steps)
    finally:
        watchdog.close()
        with contextlib.suppress(Exception):
            env.close()


def measure_in_worker(
    factory: EnvFactory, name: str, supervision: Supervision, env: object, value: object
) -> StepCost | None:
    """`measure` for `VecEnv.apply`; None if the environment cannot be built a second time there."""
    try:
        return measure(factory, name, supervision, only_waiting=True)
    except (Exception, SystemExit):
        return None


def waits(cost: StepCost | None) -> bool:
    """Whether a step mostly waits for something other than the CPU."""
    return cost is not None and cost.wall_s > _WAIT_S and cost.cpu_s < _WAITING_SHARE * cost.wall_s


def describe_wait(cost: StepCost) -> str:
    """For messages."""
    return f"a step takes {_time(cost.wall_s)}, mostly waiting"


def choose(cost: StepCost | None, num_envs: int, workers: int | None, num_cores: int) -> Choice:
    """Pick the backend with the lowest estimated time for a step of all environments."""
    if cost is None:
        count = min(workers or num_cores, num_envs)
        return Choice("process", count, "its first steps failed, and worker processes isolate failures best")
    step = f"a step takes {_time(cost.wall_s)}"
    if waits(cost) and num_envs > 1:
        count = min(workers or num_envs, num_envs)
        return Choice("process", count, f"{describe_wait(cost)}, so {count} workers wait at the same time")
    count = min(workers or num_cores, num_envs)
    local_s = num_envs * cost.wall_s
    process_s = -(-num_envs // count) * cost.wall_s * max(1.0, count / num_cores) + _PROCESS_BATCH_S
    if count > 1 and process_s < _CLEAR_GAIN * local_s:
        return Choice("process", count, f"{step}, so {count} workers should need {_time(process_s)} instead of "
                      f"{_time(local_s)} for {num_envs} environments")  # fmt: skip
    if count == 1:
        return Choice("local", 1, f"{step}, and there is one core or one environment to use")
    return Choice("local", 1, f"{step}, so {num_envs} in process need {_time(local_s)}, less than waking "
                  "worker processes would cost")  # fmt: skip


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
