"""Schedules: settings that change over a run, written as numbers or text.

`0.5` is constant. `8:64` changes linearly from 8 to 64 over the run. `1:0.1@0.3` reaches 0.1 after 30 % of it and stays
there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from corral.algos.base import ParamGroup, require
from corral.core.errors import UserError
from corral.ops.optim import Optimizer

_NUMBER = r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*"
_RAMP = re.compile(rf"{_NUMBER}:{_NUMBER}(?:@{_NUMBER})?")


@dataclass(frozen=True)
class Schedule:
    """Linear from `start` to `end`, which is reached at the fraction `until` of a run."""

    start: float
    end: float
    until: float = 1.0

    def __call__(self, progress: float) -> float:
        done = min(1.0, progress / self.until)
        if self.end == 0:  # rounded as in other libraries that anneal to 0
            return self.start * (1 - done)
        return self.start + (self.end - self.start) * done

    @property
    def maximum(self) -> float:
        return max(self.start, self.end)


def read_schedule(
    name: str, value: float | str, minimum: float | None = None, maximum: float | None = None
) -> Schedule:
    """A setting as a schedule; UserError if it is malformed or out of bounds."""
    found = _RAMP.fullmatch(value) if isinstance(value, str) else None
    try:
        numbers = [float(value)] * 2 if found is None else [float(part) for part in found.groups() if part]
    except ValueError:
        raise UserError(f"{name} must be a number, or a schedule such as 8:64 or 1:0.1@0.3, got {value!r}.") from None
    for number in numbers[:2]:
        require(name, number, minimum=minimum, maximum=maximum)
    if len(numbers) > 2:
        require(f"the end of {name}'s schedule", numbers[2], above=0, maximum=1)
    return Schedule(*numbers)


def linear_decay(start: float, *, on: bool) -> Callable[[float], float]:
    """A learning rate by progress: linear decay to 0, or constant."""
    return lambda progress: start * (1 - progress if on else 1.0)


def one_group(config: Any, optimizer: Callable[..., Optimizer], **settings: float) -> list[ParamGroup]:
    """All parameters with one optimizer, by the settings `learning_rate`, `anneal_lr` and `max_grad_norm`."""
    schedule = linear_decay(config.learning_rate, on=config.anneal_lr)
    return [ParamGroup(partial(optimizer, lr=config.learning_rate, **settings), schedule, config.max_grad_norm)]


def read_clip_coef(value: float | str) -> Schedule:
    """The clip range of PPO's ratio; it may decay to 0, but starts above."""
    schedule = read_schedule("clip_coef", value, minimum=0)
    require("clip_coef", schedule.start, above=0)
    return schedule
