"""What Corral tells its user goes through `logging`, and is seen without configuring it."""

from __future__ import annotations

import contextlib
import logging
import sys


class _UnlessConfigured(logging.Handler):
    """Prints to stderr while the program has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody can read a closed stderr
                sys.stderr.write(f"corral: {self.format(record)}\n")


def show_by_default() -> None:
    """Let choices and warnings of the `corral` logger be seen."""
    logger = logging.getLogger("corral")
    if not logger.handlers:
        logger.addHandler(_UnlessConfigured())
        logger.setLevel(logging.INFO)
