"""Number of torch threads of a learner: given, or by the cores that other processes leave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from threadpoolctl import threadpool_limits
from torch import nn

from corral.core.machine import CpuMeter, cores, free_cores
from corral.learn.device import has_convolutions

TorchThreads = int | Literal["all"] | None
_CHECK_S = 10.0


@dataclass(frozen=True)
class ThreadChoice:
    """A number of torch threads; `why` explains it."""

    number: int
    why: str = ""

    def __str__(self) -> str:
        return f"{self.number} ({self.why})" if self.why else str(self.number)


def choose_threads(wanted: TorchThreads, model: nn.Module, others: int = 0) -> ThreadChoice:
    """The number of torch threads of a learner process; `others` are threads of other processes of its run.

    Processes and threads together should not outnumber the free cores: threads that share a core wait for each other in
    every operation. Small networks get one thread: for them, distributing the work costs more than it saves.
    """
    if isinstance(wanted, int):
        return ThreadChoice(wanted)
    if not has_convolutions(model):
        return ThreadChoice(1)
    limit = max(1, cores() - others)
    if wanted == "all" or limit == 1:
        return ThreadChoice(limit)
    free = free_cores()
    return ThreadChoice(min(limit, _whole(free)), f"{free:.1f} of {cores()} cores are free")


def set_threads(number: int) -> None:
    """Set the number of threads of torch and of NumPy's BLAS, which small networks use."""
    torch.set_num_threads(number)
    threadpool_limits(number, "blas")


@contextlib.contextmanager
def own_threads() -> Iterator[None]:
    """Let the caller's numbers of threads return at the end of the block."""
    before = torch.get_num_threads()
    with threadpool_limits(None):  # restores those of BLAS
        try:
            yield
        finally:
            torch.set_num_threads(before)


class ThreadAdapter:
    """Adapts the number of torch threads while a run goes on, by the cores that other processes left to this one.

    A check reads one file; a change needs two checks that agree.
    """

    def __init__(self, number: int) -> None:
        self.number = self._proposed = number
        self._meter, self._next = CpuMeter(), time.monotonic() + _CHECK_S

    def update(self) -> str:
        """Adapt if a check is due; returns what changed, for an event."""
        if time.monotonic() < self._next:
            return ""
        self._next = time.monotonic() + _CHECK_S
        free = self._meter.free()
        if free is None:
            return ""
        before, self._proposed = self._proposed, _whole(free)
        if self._proposed != before or self._proposed == self.number:
            return ""
        text = f"torch threads {self.number} -> {self._proposed}: other processes leave {free:.1f} of {cores()} cores"
        self.number = self._proposed
        set_threads(self.number)
        return text


def _whole(free: float) -> int:
    """Threads for this many free cores; more than half a core is worth a thread."""
    return max(1, min(cores(), round(free)))
