"""The errors a user meets: a mistake to correct, and what could not go on."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what was asked for; the message is one sentence that names the remedy (exit code 2)."""


class EnvFailed(RuntimeError):
    """An environment failed more often than its restart budget allows (exit code 1)."""


class RunFailed(RuntimeError):
    """A run that cannot go on, such as one whose losses are not finite any more (exit code 1)."""
