"""In which unit values are: those of policies that learned from scaled rewards are in another than the game's."""

from __future__ import annotations

from corral.core.errors import UserError


def known_scale(scale: float | None) -> float:
    """A scale of rewards that is needed; UserError when it is not known."""
    if scale is None:
        raise UserError(
            "The rewards that this policy has learned from were scaled, and by how much was not saved: its values say "
            "nothing to a search. Train it with topology=sync, or with normalize_reward=false."
        )
    return scale
