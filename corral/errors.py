"""The two errors a user meets: a mistake to correct, and a run that could not go on."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what was asked for; the message is one sentence that names the remedy (exit code 2)."""


class EnvFailed(RuntimeError):
    """An environment failed more often than its restart budget allows (exit code 1)."""
