"""Whether an environment is still the one that a run was trained on."""

from __future__ import annotations

from corral.core.errors import UserError
from corral.core.types import EnvSpec


def require_same_env(found: EnvSpec, trained: EnvSpec) -> None:
    """UserError where the spaces differ: a network would not fit, or take its inputs for something else."""
    for what in ("observation", "action"):
        now, then = getattr(found, what), getattr(trained, what)
        if now != then:
            raise UserError(
                f"{found.name} has {what}s {now.space}, and this run was trained on {then.space}: give it the "
                "environment that it was trained on, or start a new run."
            )
