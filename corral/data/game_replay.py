"""AlphaZero's replay buffer: single steps of finished episodes, each with its outcome."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from corral.core.errors import RunFailed, UserError
from corral.core.machine import require_memory
from corral.core.types import Array, DataSpec, EnvSpec, Positions, Sample, Trajectory, slice_envs
from corral.data.episodes import EpisodeStore
from corral.data.rate_limiter import RateLimiter
from corral.data.store import START, Store, StoreContext, count_metrics
from corral.ops.returns import outcomes

TURN = "to_play"
"""The extra that contains the player who acted; without it there is one player."""


class GameReplay(Store):
    """Keeps the last `data.capacity` steps of finished episodes and samples batches with replacement.

    A step consists of its observation, the extras named in `data.extras`, and the episode's outcome for the player who
    acted (`corral.ops.returns`). A truncated episode counts as it is.
    """

    def __init__(self, spec: EnvSpec, data: DataSpec, num_envs: int, seed: int = 0):
        if data.prioritised:
            raise UserError("Steps of whole episodes are sampled uniformly: use prioritised only with unit=transition.")
        if not 1 <= data.min_size <= data.capacity:
            raise UserError(f"min_size must be between 1 and the capacity, got {data.min_size} and {data.capacity}.")
        self._spec, self._data = spec, data
        self._episodes = EpisodeStore(spec, replace(data, batch_size=1, reuse="once"), num_envs, optional=(TURN,))
        self._rng = np.random.default_rng(np.random.SeedSequence(seed))
        self._columns: dict[str, Array] = {}  # `capacity` rows, allocated when the first episode arrives
        ahead = max(2 * data.batch_size, data.samples_per_insert * data.capacity / 10)
        self.limiter = RateLimiter(data.samples_per_insert, data.min_size, ahead)

    def put(self, traj: Trajectory, priorities: Array | None = None, ctx: StoreContext = START) -> None:
        for column in range(traj.shape[1]):  # episodes of one column are removed before the next is added
            self._episodes.put(slice_envs(traj, np.array([column])))
            while self._episodes.ready():
                episode = self._episodes.get().batch
                assert isinstance(episode, Trajectory)
                self._keep(episode)

    @property
    def _size(self) -> int:
        return min(self.limiter.inserted, self._data.capacity)

    def room(self) -> bool:
        return self.limiter.may_insert()

    def ready(self) -> bool:
        return self._size > 0 and self.limiter.may_sample(self._data.batch_size)

    def get(self) -> Sample:
        if not self.ready():
            raise RunFailed("No batch may be sampled yet: check ready() before get().")
        count = self._data.batch_size
        rows = self._rng.integers(self._size, size=count)
        self.limiter.sampled += count
        taken = {name: column[rows] for name, column in self._columns.items()}
        layout = self._spec.observation
        leaves = [taken.pop(f"obs.{k}") for k in range(len(layout.leaves))]
        return Sample(Positions(layout.unflatten(leaves), taken.pop("outcome"), taken))

    def _keep(self, episode: Trajectory) -> None:
        length = episode.shape[0]
        turn = episode.extras.get(TURN, np.zeros(episode.shape, np.int8))
        rows = {
            **{f"obs.{k}": leaf[:-1, 0] for k, leaf in enumerate(self._spec.observation.flatten(episode.obs))},
            **{name: episode.extras[name][:, 0] for name in self._data.extras},
            "outcome": outcomes(episode.reward[:, 0], turn[:, 0], self._data.gamma).astype(np.float32),
        }
        if not self._columns:
            self._allocate(rows)
        places = (self.limiter.inserted + np.arange(length)) % self._data.capacity
        for name, column in rows.items():
            self._columns[name][places] = column
        self.limiter.inserted += length

    def _allocate(self, rows: dict[str, Array]) -> None:
        capacity = self._data.capacity
        require_memory(sum(row[0].nbytes for row in rows.values()) * capacity, capacity, "Replay")
        self._columns = {name: np.zeros((capacity, *row.shape[1:]), row.dtype) for name, row in rows.items()}

    def metrics(self) -> dict[str, float]:
        """Sizes and counts, in steps; `dropped` counts episodes."""
        return {
            **count_metrics(self._size, self.limiter.inserted, self.limiter.sampled),
            "store/dropped": self._episodes.metrics()["store/dropped"],
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "episodes": self._episodes.state_dict(),
            "columns": {name: column[: self._size] for name, column in self._columns.items()},
            "limiter": self.limiter.state_dict(),
            "rng": dict(self._rng.bit_generator.state),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.limiter.load_state_dict(state["limiter"])
        if any(len(rows) != self._size for rows in state["columns"].values()):
            raise UserError("The saved replay buffer has a different capacity: resume with the same settings.")
        self._episodes.load_state_dict(state["episodes"])
        self._columns = {}
        if state["columns"]:
            self._allocate(state["columns"])
            for name, rows in state["columns"].items():
                self._columns[name][: len(rows)] = rows
        self._rng.bit_generator.state = state["rng"]
