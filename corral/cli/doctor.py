"""`corral doctor`: hardware, installed packages, and what will be slow and why."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from corral.core.machine import available_bytes, cores, total_bytes
from corral.core.portable import PORTABLE
from corral.runtimes.child import THREAD_VARIABLES, start_child
from corral.runtimes.orphan_reaper import OrphanReaper

_COUNT = """
import sys, time
for line in sys.stdin:
    start, total = time.perf_counter(), 0
    for i in range(int(line)):
        total += i
    print(time.perf_counter() - start, flush=True)
"""
_PING_S = 0.2
_BUSY_S = 0.15
_ROUNDS = 3


@dataclass(frozen=True)
class Machine:
    """Facts that bound the sampling speed, some of them measured; None if the system does not report them."""

    cores: int
    cores_present: int
    cpu_quota: float | None  # CPU quota of the container, in cores
    load: float  # cores that other programs keep busy
    memory_total: int | None
    memory_free: int | None
    shm_bytes: int | None
    memfd: bool
    wake_up_s: float  # from one process's send to the other's return from its wait
    two_process_speedup: float


def look() -> Machine:
    """Inspect this machine; measures for about two seconds."""
    total, limit = total_bytes(), _cgroup("memory.max")
    quota, _, period = _cgroup("cpu.max").partition(" ")
    return Machine(
        cores=cores(),
        cores_present=os.cpu_count() or 1,
        cpu_quota=int(quota) / int(period) if quota.isdigit() and period.isdigit() else None,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        memory_total=min(total, int(limit)) if total and limit.isdigit() else total,
        memory_free=available_bytes(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        memfd=not PORTABLE,
        wake_up_s=measure_wake_up(),
        two_process_speedup=measure_speedup(),
    )


def measure_wake_up() -> float:
    """Seconds to wake a waiting process on another core: half of the median round trip."""
    reaper = OrphanReaper()
    child = start_child("corral.cli.doctor:echo", (), reaper)
    ours, trips = child.socket, []
    try:
        with _on_own_core() as other_core:
            ours.settimeout(10.0)
            ours.sendall(f"{other_core}\n".encode())
            ours.recv(1)  # it has started
            start = time.perf_counter()
            while time.perf_counter() - start < _PING_S:
                before = time.perf_counter()
                ours.send(b"x")
                ours.recv(1)
                trips.append(time.perf_counter() - before)
    finally:
        child.kill()
        child.close()
        reaper.stop()
    return statistics.median(trips) / 2


def echo(end: socket.socket) -> None:
    """Return what arrives, on the core whose number arrives first."""
    core = end.recv(16).decode().strip()
    if core:
        os.sched_setaffinity(0, {int(core)})
    end.send(b"x")
    while data := end.recv(1):
        end.send(data)


def measure_speedup() -> float:
    """Throughput of two busy processes relative to one; 2 on two idle cores."""
    with _counter() as one, _counter() as other:
        count = int(200_000 * _BUSY_S / _time([one], 200_000))
        alone = min(_time([one], count) for _ in range(_ROUNDS))
        together = min(_time([one, other], count) for _ in range(_ROUNDS))
    return 2 * alone / together


@contextlib.contextmanager
def _on_own_core() -> Iterator[str]:
    """Pin this thread to one core and yield another, if the system supports that, otherwise nothing."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(allowed) < 2:
        yield ""
        return
    os.sched_setaffinity(0, {allowed[0]})
    try:
        yield str(allowed[1])
    finally:
        os.sched_setaffinity(0, allowed)


def _counter() -> subprocess.Popen[str]:
    """A process that counts on request and exits when its stdin is closed."""
    return subprocess.Popen([sys.executable, "-c", _COUNT], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _time(processes: list[subprocess.Popen[str]], count: int) -> float:
    """Let all processes count at the same time; returns the seconds of the slowest."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
    return max(float(p.stdout.readline()) for p in processes if p.stdout is not None)


def _cgroup(name: str) -> str:
    try:
        with open(f"/sys/fs/cgroup/{name}") as file:
            return file.read().strip()
    except OSError:
        return ""


EXTRAS = {
    "atari": ("ale_py", "cv2"),
    "envpool": ("envpool",),
    "sb3": ("stable_baselines3",),
    "pixels": ("pygame", "cv2"),
    "plot": ("matplotlib",),
    "video": ("imageio_ffmpeg", "pygame"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "box2d": ("Box2D", "pygame"),
    "bullet": ("pybullet",),
    "games": ("pettingzoo", "chess", "pygame"),
    "mujoco": ("mujoco",),
    "ray": ("ray",),
    "rllib": ("ray", "tree", "pyarrow"),
    "grpc": ("grpc",),
}
"""Extra -> modules that it installs."""

_PACKAGES = ("corral-rl", "torch", "numpy", "gymnasium", "numba", "ale-py", "envpool", "stable-baselines3")
_GB = 1 << 30


@dataclass(frozen=True)
class Doctor:
    """Show cores, threads, memory, versions and extras, measure how processes scale, and report what will be slow."""

    def run(self) -> int:
        import torch

        from corral.cli.console import make_console, print_row

        console = make_console()
        machine = look()
        threads = torch.get_num_threads()
        gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        measured = [
            ("process wake-up", f"{machine.wake_up_s * 1e6:.0f} us"),
            ("two processes", f"{machine.two_process_speedup:.2f}x the work of one"),
        ]
        for title, facts in (
            ("Machine", _machine_facts(machine, gpus or "none that torch can use")),
            ("Measured", measured),
            ("Threads", _thread_facts(threads)),
            ("Versions", _versions()),
            ("Extras", _extras()),
        ):
            console.print(title, style="bold")
            for name, value in facts:
                print_row(console, ("", 0, ""), (name, 18, ""), (value, None, ""))
            console.print()
        console.print("What will be slow, and why", style="bold")
        for sentence in advice(machine, threads) or ["Nothing found."]:
            print_row(console, ("-", 1, "yellow"), (sentence, None, ""))
        return 0


def advice(machine: Machine, torch_threads: int) -> list[str]:
    """What the facts mean for sampling and training, in sentences."""
    return [*_cpu_advice(machine), *_other_advice(machine, torch_threads)]


def _cpu_advice(machine: Machine) -> Iterator[str]:
    if machine.cores == 1:
        yield (
            "One core: worker processes are not faster than backend='local', except for environments that wait for "
            "I/O or another program."
        )
    elif machine.cores < machine.cores_present:
        yield (
            f"CPU affinity limits this process to {machine.cores} of {machine.cores_present} cores; Corral starts that "
            "many workers."
        )
    if machine.cpu_quota is not None and machine.cpu_quota < machine.cores:
        yield (
            f"The container may use {machine.cpu_quota:g} cores' worth of time on {machine.cores} cores: "
            "more busy processes than that are throttled for part of every 100 ms; set "
            f"workers={max(1, int(machine.cpu_quota))}."
        )
    if machine.load > 0.5 * machine.cores:
        yield (
            f"Other programs kept {machine.load:.1f} cores busy over the last minute: runs and measurements are slower "
            "and less stable."
        )
    speedup, wake = machine.two_process_speedup, machine.wake_up_s
    if machine.cores > 1 and speedup < 1.6:
        yield (
            f"Two busy processes do only {speedup:.1f} times the work of one: the cores are shared with other programs "
            "or are two hyperthreads of one core. Expect the same speedup from two workers."
        )
    if wake > 25e-6:
        yield (
            f"Waking another process takes {wake * 1e6:.0f} us (5 to 10 on a desktop, 50 to 150 on virtual "
            "machines), so on backend='process' a step of all environments costs at least "
            f"{2 * wake * 1e6:.0f} us besides stepping: keep cheap environments on backend='local', or give "
            "each worker many of them."
        )


def _other_advice(machine: Machine, torch_threads: int) -> Iterator[str]:
    if torch_threads > 1:
        yield (
            f"torch uses {torch_threads} threads in the main process: small networks are often faster, sometimes many "
            "times, with torch.set_num_threads(1), which leaves the other cores to workers."
        )
    if torch_threads > machine.cores:
        yield f"torch uses more threads than the {machine.cores} usable cores; they wait for each other."
    if machine.memory_free is not None and machine.memory_free < 4 * _GB:
        yield (
            f"{machine.memory_free / _GB:.1f} GB of memory are free: each worker process takes about 0.1 GB "
            "besides its environments, and a replay buffer of a million Atari frames takes 7 GB."
        )
    if not machine.memfd:
        yield (
            "This system has no memfd: except on Windows, shared memory is a temporary file, which is slow if it is on "
            "a disk (TMPDIR chooses the folder)."
        )
    elif machine.shm_bytes is not None and machine.shm_bytes < _GB:
        yield (
            f"/dev/shm holds {machine.shm_bytes / _GB:.2f} GB: Corral does not use it, but torch's "
            "DataLoader and Ray do, and fail or slow down when it is full."
        )


def _machine_facts(machine: Machine, gpus: str) -> Iterator[tuple[str, str]]:
    quota = f", container quota {machine.cpu_quota:g}" if machine.cpu_quota is not None else ""
    yield "cores", f"{machine.cores} usable of {machine.cores_present}{quota}, load {machine.load:.1f}"
    if machine.memory_total is not None and machine.memory_free is not None:
        yield "memory", f"{machine.memory_free / _GB:.1f} GB free of {machine.memory_total / _GB:.1f} GB"
    if machine.shm_bytes is not None:
        yield "/dev/shm", f"{machine.shm_bytes / _GB:.2f} GB"
    yield "memfd", "yes" if machine.memfd else "no"
    yield "GPU", gpus
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"


def _thread_facts(torch_threads: int) -> Iterator[tuple[str, str]]:
    import numpy as np

    config: Any = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {}).get("name", "unknown BLAS")
    chosen = ", ".join(f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if name in os.environ)
    yield "torch", f"{torch_threads} threads in this process"
    yield "numpy", f"{blas}, {chosen or 'one thread per core (no OMP_NUM_THREADS or similar is set)'}"
    yield "Corral's workers", "1 thread each"


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} ({sys.executable})"
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _extras() -> Iterator[tuple[str, str]]:
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            yield extra, f"missing {', '.join(missing)}: pip install 'corral-rl[{extra}]'"
        else:
            yield extra, "present"
