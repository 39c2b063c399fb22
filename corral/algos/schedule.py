"""Schedules: settings that change over a run, written as numbers or text.

`0.5` stays what it is. `8->64` goes evenly from one to the other over the run, and `1->0.1@0.3` is there after 30 % of
it and stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from corral.algos.base import require
from corral.core.errors import UserError

_NUMBER = r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*"
_RAMP = re.compile(rf"{_NUMBER}->{_NUMBER}(?:@{_NUMBER})?")


@dataclass(frozen=True)
class Schedule:
    """From `start` to `end` by the time that the share `until` of a run is done."""

    start: float
    end: float
    until: float = 1.0

    def __call__(self, progress: float) -> float:
        """What it is after this share of the run."""
        return self.start + (self.end - self.start) * min(1.0, progress / self.until)

    @property
    def most(self) -> float:
        """The greatest that it gets."""
        return max(self.start, self.end)


def read_schedule(name: str, value: float | str, least: float | None = None, most: float | None = None) -> Schedule:
    """A setting as a schedule; UserError when it is none, or leaves its bounds."""
    found = _RAMP.fullmatch(value) if isinstance(value, str) else None
    try:
        numbers = [float(value)] * 2 if found is None else [float(part) for part in found.groups() if part]
    except ValueError:
        raise UserError(f"{name} must be a number, or a schedule such as 8->64 or 1->0.1@0.3, got {value!r}.") from None
    for number in numbers[:2]:
        require(name, number, least=least, most=most)
    if len(numbers) > 2:
        require(f"the end of {name}'s schedule", numbers[2], above=0, most=1)
    return Schedule(*numbers)


def linear_decay(start: float, *, on: bool) -> Callable[[float], float]:
    """A learning rate by progress: falling linearly to 0, or constant."""
    return lambda progress: start * (1 - progress if on else 1.0)
