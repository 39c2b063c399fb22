"""Returns and lengths of finished games, from the steps as they come by."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from corral.types import StepBatch


@dataclass(frozen=True)
class Episode:
    """One finished game: its environment, the sum of its raw rewards, and its steps."""

    env_id: int
    episode_return: float
    length: int


class EpisodeStats:
    """Sums raw rewards over whole games.

    Lives lost do not end a game, and a game cut short by a fault is dropped: it says nothing of the policy.
    """

    def __init__(self, num_envs: int, keep: int = 1000):
        self.finished = 0
        self.faulty = 0
        self.recent: deque[Episode] = deque(maxlen=keep)
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def add(self, batch: StepBatch) -> None:
        """Take in one batch of steps."""
        ids = batch.env_ids
        self._returns[ids] += batch.raw_reward
        self._lengths[ids] += 1
        if not batch.first.any():
            return
        over = ids[batch.game_over & ~batch.faulty]
        for env_id in over.tolist():
            self.recent.append(Episode(env_id, float(self._returns[env_id]), int(self._lengths[env_id])))
        self.finished += len(over)
        self.faulty += int(np.count_nonzero(batch.faulty))
        ended = ids[batch.game_over | batch.faulty]
        self._returns[ended] = 0.0
        self._lengths[ended] = 0

    def mean_return(self, last: int = 100) -> float:
        """Mean return of the last games; NaN before the first has finished."""
        returns = [episode.episode_return for episode in list(self.recent)[-last:]]
        return float(np.mean(returns)) if returns else float("nan")
