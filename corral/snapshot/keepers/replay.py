"""States of environments that nothing else keeps: how their episode began, and every action since.

An environment is brought into a state by repeating them. It remembers where it is, so going on from the state that it
has just reached repeats nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

from corral.snapshot.find_rng import RngFinder
from corral.snapshot.keeper import CannotSave, Env, EpisodeStart, StateKeeper, Tape
from corral.snapshot.rng import RngState

_MAX_STEPS = 50_000  # after the beginning
_POINT_BYTES = 600


class ReplayPoint:
    """A state: an action after another state, with the seed of its dice if they are others; or a beginning."""

    __slots__ = ("action", "before", "beginning", "seed", "steps")

    def __init__(
        self, beginning: EpisodeStart, before: ReplayPoint | None = None, action: Any = None, seed: int | None = None
    ):
        self.beginning, self.before, self.action, self.seed = beginning, before, action, seed
        self.steps: int = 0 if before is None else before.steps + 1


class _Where:
    """Where an environment is: at a point, or there with other dice; None when it is nowhere that is known."""

    def __init__(self) -> None:
        self.point: ReplayPoint | None = None
        self.seed: int | None = None


class ReplayKeeper(StateKeeper):
    """States as the way that leads to them."""

    level = 1

    def __init__(self) -> None:
        self._where: weakref.WeakKeyDictionary[Env, _Where] = weakref.WeakKeyDictionary()
        self._dice = RngFinder()

    def keep(self, env: Env, tape: Tape | None = None) -> ReplayPoint:
        """Note the way."""
        if tape is not None:
            beginning = tape()
            if beginning is None:
                raise CannotSave("its episode began before it was watched, or is too long to be repeated")
            return ReplayPoint(beginning)
        where = self._where[env]
        if where.point is None or where.seed is not None:
            raise CannotSave("it has not been stepped since it got other dice")
        return where.point

    def put(self, env: Env, kept: ReplayPoint) -> None:
        """Go on from where it is, if that leads there, or repeat everything."""
        where = self._where.setdefault(env, _Where())
        at = where.point if where.seed is None else None
        way: list[ReplayPoint] = []
        point: ReplayPoint | None = kept
        while point is not None and point is not at:
            way.append(point)
            point = point.before
        where.point = None
        if point is None:
            way.pop().beginning.repeat(env)
            where.point = None  # where that led, in the middle of what follows
        for step in reversed(way):
            if step.seed is not None:
                self._dice.reseed(env, step.seed)
            env.step(step.action)
        where.point, where.seed = kept, None

    def leave(self, env: Env) -> None:
        """Forget where it is."""
        self._where.pop(env, None)

    def reseed(self, env: Env, seed: int) -> None:
        """Other numbers for the generators that can be found."""
        self._dice.reseed(env, seed)
        self._where[env].seed = seed

    def dice(self, env: Env) -> list[RngState]:
        """The generators that can be found."""
        return self._dice.read(env)

    def step(self, env: Env, action: Any) -> Any:
        """Step, and note it."""
        where = self._where[env]
        before, where.point = where.point, None
        assert before is not None
        if before.steps >= _MAX_STEPS:
            raise CannotSave(f"it is {_MAX_STEPS:,} steps after where it began")
        result = env.step(action)
        where.point, where.seed = ReplayPoint(before.beginning, before, action, where.seed), None
        return result

    def nbytes(self, kept: ReplayPoint) -> int:
        """An action, or all of them."""
        return kept.beginning.nbytes if kept.before is None else _POINT_BYTES
