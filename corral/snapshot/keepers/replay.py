"""States as the start of their episode and every action since, for environments that no other keeper supports.

A state is loaded by repeating the actions. The keeper knows where an environment is, so that continuing from the state
that it has just reached repeats nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

from corral.snapshot.find_rng import RngFinder
from corral.snapshot.keeper import CannotSave, Env, EpisodeStart, FindStart, StateKeeper
from corral.snapshot.rng import RngState

_MAX_STEPS = 50_000  # after the start
_POINT_BYTES = 600


class ReplayPoint:
    """A state: the start of an episode, or an action after another state, with the seed if it was reseeded."""

    __slots__ = ("action", "before", "seed", "start", "steps")

    def __init__(
        self, start: EpisodeStart, before: ReplayPoint | None = None, action: Any = None, seed: int | None = None
    ):
        self.start, self.before, self.action, self.seed = start, before, action, seed
        self.steps: int = 0 if before is None else before.steps + 1


_Where = tuple[ReplayPoint | None, int | None]  # a point, None if unknown; and the seed, if it was reseeded there
_UNKNOWN: _Where = (None, None)


class ReplayKeeper(StateKeeper):
    """Keeps states as the actions that lead to them."""

    level = 1

    def __init__(self) -> None:
        self._where: weakref.WeakKeyDictionary[Env, _Where] = weakref.WeakKeyDictionary()
        self._rng_finder = RngFinder()

    def save(self, env: Env, find_start: FindStart | None = None) -> ReplayPoint:
        if find_start is not None:
            start = find_start()
            if start is None:
                raise CannotSave("its episode began before recording, or is too long to replay")
            return ReplayPoint(start)
        point, seed = self._where[env]
        if point is None or seed is not None:
            raise CannotSave("it has not been stepped since it was reseeded")
        return point

    def load(self, env: Env, kept: ReplayPoint) -> None:
        at, seed = self._where.get(env, _UNKNOWN)
        way: list[ReplayPoint] = []
        point: ReplayPoint | None = kept
        while point is not None and (point is not at or seed is not None):
            way.append(point)
            point = point.before
        self._where[env] = _UNKNOWN
        if point is None:
            way.pop().start.repeat(env)
            self._where[env] = _UNKNOWN  # until all steps are made
        for step in reversed(way):
            if step.seed is not None:
                self._rng_finder.reseed(env, step.seed)
            env.step(step.action)
        self._where[env] = kept, None

    def release(self, env: Env) -> None:
        self._where.pop(env, None)

    def reseed(self, env: Env, seed: int) -> None:
        self._rng_finder.reseed(env, seed)
        self._where[env] = self._where[env][0], seed

    def rng_state(self, env: Env) -> list[RngState]:
        return self._rng_finder.read(env)

    def step(self, env: Env, action: Any) -> Any:
        before, seed = self._where[env]
        assert before is not None
        self._where[env] = _UNKNOWN
        if before.steps >= _MAX_STEPS:
            raise CannotSave(f"its episode has more than {_MAX_STEPS:,} steps")
        result = env.step(action)
        self._where[env] = ReplayPoint(before.start, before, action, seed), None
        return result

    def nbytes(self, kept: ReplayPoint) -> int:
        return kept.start.nbytes if kept.before is None else _POINT_BYTES
