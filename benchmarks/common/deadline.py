"""A limit on how long a part of a benchmark may take, whatever it waits for."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class TookTooLong(Exception):
    """A part of a benchmark gave no answer in time."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in the block when it takes longer.

    Peers wait for their processes without a limit of their own; a signal gets them out of it. Off the main
    thread, where Python takes no signals, the block is not limited.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(number: int, frame: Any) -> None:
        raise TookTooLong(f"no answer for {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
