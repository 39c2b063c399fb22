"""Warns of a user's callback or sink that blocks the run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

SLOW_S = 30.0
"""A call that takes longer is named in a warning."""


class SlowCalls:
    """Warns, from a thread, about a call that blocks the run for long. Calls may be nested; the innermost is named."""

    def __init__(self, note: Callable[[str, str], None], *, enabled: bool = True):
        self._note, self._enabled = note, enabled
        self._call: tuple[str, str, float] | None = None  # kind, name, start
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def current(self) -> str | None:
        call = self._call
        return None if call is None else f"{call[0]} {call[1]}"

    @contextlib.contextmanager
    def watch(self, kind: str, name: str) -> Iterator[None]:
        """Watch the block, a call of `name`; a warning is an event `slow_{kind}`."""
        outer, self._call = self._call, (kind, name, time.monotonic())
        if self._thread is None and self._enabled:
            self._thread = threading.Thread(target=self._monitor, name="corral-slow-calls", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._call = outer

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _monitor(self) -> None:
        warned = None
        while not self._closed.wait(min(1.0, SLOW_S / 4)):
            call = self._call
            if call is not None and call is not warned and time.monotonic() - call[2] > SLOW_S:
                warned, (kind, name, _) = call, call
                self._note(f"slow_{kind}", f"{kind} {name} has been running for {SLOW_S:g} s; the run waits for it")
