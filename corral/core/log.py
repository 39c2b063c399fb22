"""Corral's messages go through `logging`, and are visible without configuring it."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _DefaultHandler(logging.Handler):
    """Prints to stderr unless the program has set up logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers or not logging.getLogger("corral").propagate:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed
                sys.stderr.write(f"corral: {self.format(record)}\n")


def show_by_default() -> None:
    """Print info messages and warnings of the `corral` logger by default."""
    logger = logging.getLogger("corral")
    if not logger.handlers:
        logger.addHandler(_DefaultHandler())
        logger.setLevel(logging.INFO)


@contextlib.contextmanager
def own_format() -> Iterator[None]:
    """Within the block, messages are printed as usual even if a package, such as dm_control, sets up logging."""
    logger = logging.getLogger("corral")
    before = logger.propagate
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before


@contextlib.contextmanager
def print_only_errors() -> Iterator[None]:
    """Print no info messages and warnings within the block; a program that set up logging itself still gets them."""
    before = [(each, each.level) for each in logging.getLogger("corral").handlers if isinstance(each, _DefaultHandler)]
    for handler, _ in before:
        handler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler, level in before:
            handler.setLevel(level)


@contextlib.contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """Set the level of a logger within the block."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


class Repeats(Generic[T]):
    """Counts what repeats itself, to show it the first time and each time its number has doubled."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._hidden: dict[str, T] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, key: str, value: T) -> int:
        """How often `key` was counted, if `value` is to be shown; otherwise 0, and `value` is kept for the end."""
        self._counts[key] += 1
        count = self._counts[key]
        if count & (count - 1):
            self._hidden[key] = value
            return 0
        self._hidden.pop(key, None)
        return count

    def rest(self) -> list[tuple[int, T]]:
        """For each key with a count that was not shown: the count, and the last value."""
        rest = [(self._counts[key], value) for key, value in self._hidden.items()]
        self._hidden.clear()
        return rest


_AT_ONCE, _EVERY_S = 10, 10.0


class RateLimitedLog:
    """Passes the first warnings on at once, then one every 10 s with the number suppressed in between."""

    def __init__(self, log: logging.Logger):
        self._log, self._left, self._since, self._suppressed = log, _AT_ONCE, time.monotonic(), 0

    def warning(self, text: str) -> None:
        now = time.monotonic()
        if now - self._since > _EVERY_S:
            more = f" ({self._suppressed} more warnings were suppressed)" if self._suppressed else ""
            self._log.warning("%s%s", text, more)
            self._left, self._since, self._suppressed = _AT_ONCE - 1, now, 0
        elif self._left > 0:
            self._left -= 1
            self._log.warning("%s", text)
        else:
            self._suppressed += 1
