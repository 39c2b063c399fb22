"""The errors a user meets: a mistake to correct, and failures that end a run."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in the request; the message is one sentence that names the remedy (exit code 2)."""


class EnvFailed(RuntimeError):
    """An environment failed more often than its restart budget allows (exit code 1)."""


class RunFailed(RuntimeError):
    """A run that cannot continue, for example because its losses are no longer finite (exit code 1)."""
