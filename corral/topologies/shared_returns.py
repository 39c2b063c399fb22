"""Statistics of discounted returns that actors share, where rewards are normalised: one scale for all of them.

Each fragment brings the moments of its own returns. The learner merges them and sends the merged ones with the next
request, and how many fragments of that actor they include; the actor adds those of its later fragments again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

from corral.core.encoding import Value
from corral.envs.normalize import NormalizedVecEnv, RunningMoments
from corral.envs.vec_env import VecEnv

_MAX_UNMERGED = 64  # fragments; an actor has at most two in flight


class LearnerReturns:
    """The learner's side: moments of all actors."""

    def __init__(self) -> None:
        self.all = RunningMoments()
        self._merged: dict[str, int] = {}  # fragments of each actor, since it was started

    def forget(self, actor: str) -> None:
        """The actor was started again, and counts its fragments anew."""
        self._merged.pop(actor, None)

    def take(self, actor: str, moments: Mapping[str, Any] | None) -> None:
        self._merged[actor] = self._merged.get(actor, 0) + 1
        if moments is not None:
            new = RunningMoments()
            new.load_state_dict(moments)
            self.all.merge(new)

    def for_actor(self, actor: str) -> Value:
        return {"moments": self.all.state_dict(), "merged": self._merged.get(actor, 0)}


class ActorReturns:
    """An actor's side. With `shared` false, for a single actor, its own moments are never replaced by merged ones,
    whose last bits differ, unless it has none: it was just started.
    """

    def __init__(self, vec: VecEnv, *, shared: bool):
        self._own = vec.statistics.returns if isinstance(vec, NormalizedVecEnv) else None
        self._shared, self._sent = shared, 0
        self._unmerged: deque[tuple[int, RunningMoments]] = deque(maxlen=_MAX_UNMERGED)
        self._before: RunningMoments | None = None

    def begin(self, known: Mapping[str, Any]) -> None:
        """Start a fragment with the moments that the learner knows."""
        if self._own is None:
            return
        if self._shared or not self._own.count:
            while self._unmerged and self._unmerged[0][0] < known["merged"]:
                self._unmerged.popleft()
            self._own.load_state_dict(known["moments"])
            for _, moments in self._unmerged:
                self._own.merge(moments)
        self._before = copy.copy(self._own)

    def end(self) -> Value:
        """The moments that the fragment added."""
        if self._own is None or self._before is None:
            return None
        new = self._own.since(self._before)
        self._unmerged.append((self._sent, new))
        self._sent += 1
        return new.state_dict()
