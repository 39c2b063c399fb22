"""Waiting for answers that come quickly: being woken costs 30 us and more, so stay awake for a moment first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

_AWAKE_S = 100e-6  # at most, in one wait
_SMOOTHING = 0.2


class Awake:
    """Waits by `poll(seconds)`, which gives what has happened: awake at first, while waits have been short of late.

    Others that want this core get it meanwhile.
    """

    def __init__(self, poll: Callable[[float], list[Any]]):
        self._poll = poll
        self._usual_s = 0.0

    def wait(self, timeout_s: float) -> list[Any]:
        """What happens first, or nothing in this time."""
        poll = self._poll
        ready = poll(0.0)
        if ready or not timeout_s:
            return ready
        start = time.perf_counter()
        if self._usual_s < _AWAKE_S:
            until = start + min(timeout_s, _AWAKE_S)
            while not ready and time.perf_counter() < until:
                os.sched_yield()
                ready = poll(0.0)
        if not ready:
            ready = poll(timeout_s)
        self._usual_s += _SMOOTHING * (time.perf_counter() - start - self._usual_s)
        return ready
