"""`corral doctor`: this machine, what is installed, and what will be slow and why."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from corral.cli.machine import Machine, look

EXTRAS = {
    "atari": ("ale_py", "cv2"),
    "envpool": ("envpool",),
    "sb3": ("stable_baselines3",),
    "pixels": ("pygame", "cv2"),
    "plot": ("matplotlib",),
    "video": ("imageio_ffmpeg", "pygame"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "bullet": ("pybullet",),
    "games": ("pettingzoo", "chess", "pygame"),
    "mujoco": ("mujoco",),
    "ray": ("ray",),
    "rllib": ("ray", "tree", "pyarrow"),
    "grpc": ("grpc",),
}
"""Extra -> the modules that it brings."""

_PACKAGES = ("corral-rl", "torch", "numpy", "gymnasium", "numba", "ale-py", "envpool", "stable-baselines3")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_GB = 1 << 30


@dataclass(frozen=True)
class Doctor:
    """Show cores, threads, memory, versions and extras, measure two things, and say what will be slow."""

    def run(self) -> int:
        """Print the report."""
        from corral.cli.console import make_console, print_row

        console = make_console()
        machine = look()
        threads, gpus = _torch()
        for title, facts in (
            ("Machine", _machine_facts(machine, gpus)),
            ("Measured", _measured_facts(machine)),
            ("Threads", _thread_facts(threads)),
            ("Versions", _versions()),
            ("Extras", _extras()),
        ):
            console.print(title, style="bold")
            for name, value in facts:
                print_row(console, ("", 0, ""), (name, 18, ""), (value, None, ""))
            console.print()
        console.print("What will be slow, and why", style="bold")
        for sentence in advice(machine, threads) or ["Nothing stands out."]:
            print_row(console, ("-", 1, "yellow"), (sentence, None, ""))
        return 0


def advice(machine: Machine, torch_threads: int | None) -> list[str]:
    """What the facts mean for sampling and training, in sentences."""
    return [
        *_cpu_advice(machine),
        *_latency_advice(machine),
        *_thread_advice(machine, torch_threads),
        *_memory_advice(machine),
    ]


def _cpu_advice(machine: Machine) -> Iterator[str]:
    if machine.cores == 1:
        yield (
            "One core: worker processes cannot compute faster than backend='local'; they only help "
            "environments that wait for something else."
        )
    elif machine.cores < machine.cores_present:
        yield (
            f"This process may use {machine.cores} of the machine's {machine.cores_present} cores (its "
            "affinity); Corral starts that many workers."
        )
    if machine.cpu_quota is not None and machine.cpu_quota < machine.cores:
        yield (
            f"The container may use {machine.cpu_quota:g} cores' worth of time on {machine.cores} cores: "
            "more busy processes than that are stopped for a part of every 100 ms; set "
            f"workers={max(1, int(machine.cpu_quota))}."
        )
    if machine.load is not None and machine.load > 0.5 * machine.cores:
        yield (
            f"Other programs kept {machine.load:.1f} cores busy over the last minute: everything here, and "
            "every measurement, is slower and less steady for it."
        )
    speedup = machine.two_process_speedup
    if speedup is not None and machine.cores > 1 and speedup < 1.6:
        yield (
            f"Two busy processes get only {speedup:.1f} times as much done as one: the cores are shared with "
            "others or are two threads of one core, so expect the same of two workers."
        )


def _latency_advice(machine: Machine) -> Iterator[str]:
    wake = machine.wake_up_s
    if wake is not None and wake > 25e-6:
        yield (
            f"Waking another process takes {wake * 1e6:.0f} us (5 to 10 on a desktop, 50 to 150 on virtual "
            "machines), so on backend='process' a step of all environments costs at least "
            f"{2 * wake * 1e6:.0f} us besides stepping: keep cheap environments on backend='local', or give "
            "each worker many of them."
        )


def _thread_advice(machine: Machine, torch_threads: int | None) -> Iterator[str]:
    if torch_threads is not None and torch_threads > 1:
        yield (
            f"torch uses {torch_threads} threads in the main process: small networks are often faster, "
            "sometimes many times, with torch.set_num_threads(1), which leaves the other cores to workers."
        )
    if torch_threads is not None and torch_threads > machine.cores:
        yield f"torch uses more threads than the {machine.cores} usable cores; they wait for each other."


def _memory_advice(machine: Machine) -> Iterator[str]:
    if machine.memory_free is not None and machine.memory_free < 4 * _GB:
        yield (
            f"{machine.memory_free / _GB:.1f} GB of memory are free: each worker process takes about 0.1 GB "
            "besides its environments, and a replay of a million Atari frames 7 GB."
        )
    if not machine.memfd:
        yield (
            "This system has no memfd: shared memory lives in a temporary file, which is slow where that is on a disk."
        )
    elif machine.shm_bytes is not None and machine.shm_bytes < _GB:
        yield (
            f"/dev/shm holds {machine.shm_bytes / _GB:.2f} GB: Corral does not use it, but torch's "
            "DataLoader and Ray do, and stop or slow down when it is full."
        )


def _machine_facts(machine: Machine, gpus: str) -> Iterator[tuple[str, str]]:
    quota = f", container quota {machine.cpu_quota:g}" if machine.cpu_quota is not None else ""
    load = f", load {machine.load:.1f}" if machine.load is not None else ""
    yield "cores", f"{machine.cores} usable of {machine.cores_present}{quota}{load}"
    if machine.memory_total is not None and machine.memory_free is not None:
        yield "memory", f"{machine.memory_free / _GB:.1f} GB free of {machine.memory_total / _GB:.1f} GB"
    if machine.shm_bytes is not None:
        yield "/dev/shm", f"{machine.shm_bytes / _GB:.2f} GB"
    yield "memfd", "yes" if machine.memfd else "no"
    yield "GPU", gpus
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"


def _measured_facts(machine: Machine) -> Iterator[tuple[str, str]]:
    if machine.wake_up_s is not None:
        yield "process wake-up", f"{machine.wake_up_s * 1e6:.0f} us"
    if machine.two_process_speedup is not None:
        yield "two processes", f"{machine.two_process_speedup:.2f}x the work of one"


def _thread_facts(torch_threads: int | None) -> Iterator[tuple[str, str]]:
    yield "torch", "not installed" if torch_threads is None else f"{torch_threads} threads in this process"
    yield "numpy", f"{_blas()}, {_blas_threads()}"
    yield "Corral's workers", "1 thread each"


def _blas() -> str:
    import numpy as np

    config: Any = np.show_config(mode="dicts")
    return str(config.get("Build Dependencies", {}).get("blas", {}).get("name", "unknown BLAS"))


def _blas_threads() -> str:
    chosen = [f"{name}={os.environ[name]}" for name in _THREAD_VARIABLES if name in os.environ]
    return ", ".join(chosen) or "one thread per core (no OMP_NUM_THREADS or the like is set)"


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} ({sys.executable})"
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _extras() -> Iterator[tuple[str, str]]:
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if not _installed(name)]
        if missing:
            yield extra, f"missing {', '.join(missing)}: pip install 'corral-rl[{extra}]'"
        else:
            yield extra, "present"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        return False


def _torch() -> tuple[int | None, str]:
    """torch's threads, and the GPUs that it sees."""
    try:
        import torch
    except ModuleNotFoundError:
        return None, "unknown without torch"
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    return torch.get_num_threads(), names or "none that torch can use"
