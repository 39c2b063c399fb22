"""Checks of settings, as sentences."""

from __future__ import annotations

from corral.core.errors import UserError


def require(
    name: str, value: float, *, least: float | None = None, most: float | None = None, above: float | None = None
) -> None:
    """UserError unless a number is within its bounds."""
    if least is not None and not value >= least:
        raise UserError(f"{name} must be at least {least:g}, got {value:g}.")
    if most is not None and not value <= most:
        raise UserError(f"{name} must be at most {most:g}, got {value:g}.")
    if above is not None and not value > above:
        raise UserError(f"{name} must be above {above:g}, got {value:g}.")
