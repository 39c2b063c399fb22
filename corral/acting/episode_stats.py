"""Returns and lengths of finished episodes, computed from steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from corral.core.types import Array, StepBatch

_DTYPES = {"env_id": np.int64, "episode_return": np.float64, "length": np.int64}


@dataclass(frozen=True)
class Episode:
    """One finished episode: its environment, the sum of its raw rewards, and its length."""

    env_id: int
    episode_return: float
    length: int


class EpisodeStats:
    """Tracks unclipped returns and lengths of whole games (all lives).

    A lost life does not end a game, and a game cut short by a fault is dropped: it does not measure the policy.
    """

    def __init__(self, num_envs: int, keep: int = 1000):
        self.finished = 0
        self.faulty = 0
        self._reported = 0  # finished games that `new_rows` has returned
        self.recent: deque[Episode] = deque(maxlen=keep)
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def add(self, batch: StepBatch, envs: slice | Array) -> None:
        """Add one batch of steps; `envs` are its environments, as a slice if they are consecutive."""
        self._returns[envs] += batch.raw_reward
        self._lengths[envs] += 1
        if batch.final_obs is None:  # no episode ended
            return
        for row in (batch.game_over | batch.faulty).nonzero()[0].tolist():
            env_id = int(batch.env_ids[row])
            if batch.faulty[row]:
                self.faulty += 1
            else:
                self.finished += 1
                self.recent.append(Episode(env_id, float(self._returns[env_id]), int(self._lengths[env_id])))
            self._returns[env_id] = self._lengths[env_id] = 0

    def new_rows(self, first_id: int) -> list[list[Any]]:
        """Games finished since the last call, as `Episode(*row)`; environment ids start at `first_id`."""
        count, self._reported = self.finished - self._reported, self.finished
        games = list(self.recent)[-count:] if count else []
        return [[game.env_id + first_id, game.episode_return, game.length] for game in games]

    def mean_return(self, last: int = 100) -> float:
        """Mean return of the last games; NaN before the first has finished."""
        returns = [episode.episode_return for episode in list(self.recent)[-last:]]
        return float(np.mean(returns)) if returns else float("nan")

    def mean_length(self, last: int = 100) -> float:
        lengths = [episode.length for episode in list(self.recent)[-last:]]
        return float(np.mean(lengths)) if lengths else float("nan")

    def drop(self, ids: list[int]) -> None:
        self._returns[ids] = 0.0
        self._lengths[ids] = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "finished": self.finished,
            "faulty": self.faulty,
            "recent": {key: np.array([getattr(e, key) for e in self.recent], dtype) for key, dtype in _DTYPES.items()},
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.finished, self.faulty = state["finished"], state["faulty"]
        columns = [state["recent"][key].tolist() for key in _DTYPES]
        self.recent.clear()
        self.recent.extend(Episode(*row) for row in zip(*columns, strict=True))
        if len(state["returns"]) == len(self._returns):  # otherwise the run has other environments, in new episodes
            self._returns[:], self._lengths[:] = state["returns"], state["lengths"]
