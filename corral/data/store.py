"""The interface between acting and learning, independent of the algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from corral.core.errors import RunFailed
from corral.core.types import Array, Sample, Trajectory


@dataclass(frozen=True)
class StoreContext:
    """The state of the run when data is added; later samples depend on it."""

    progress: float = 0.0
    """Fraction of the run's steps that are done, 0 to 1."""
    reward_scale: float = 1.0
    """Factor of the rewards of replayed transitions when they are sampled."""


START = StoreContext()


def named_extras(traj: Trajectory, names: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Array]:
    """The recorded extras that an algorithm's `DataSpec` names; RunFailed if the policy does not record one."""
    missing = [name for name in names if name not in traj.extras]
    if missing:
        raise RunFailed(
            f"The algorithm's DataSpec names the extra '{missing[0]}', which its policy does not record; it records "
            f"{', '.join(traj.extras) or 'none'}."
        )
    return {name: traj.extras[name] for name in (*names, *(name for name in optional if name in traj.extras))}


def count_metrics(size: int, inserted: int, sampled: int) -> dict[str, float]:
    """The metrics that every store has."""
    return {"store/size": float(size), "store/inserted": float(inserted), "store/sampled": float(sampled)}


class Store(ABC):
    """Takes fragments and returns batches.

    ```python
    store.put(trajectory)
    while store.ready():
        sample = store.get()
        ...
        store.feedback(sample.keys, priorities)
    ```
    """

    @abstractmethod
    def put(self, traj: Trajectory, priorities: Array | None = None, ctx: StoreContext = START) -> None:
        """Add a fragment; `priorities` [T, B] are of the transitions that start in its rows.

        Of `traj.extras`, those named in the algorithm's `DataSpec` are kept.
        """

    @abstractmethod
    def room(self) -> bool:
        """Whether a fragment may be added now, or learning has to catch up first."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether `get` would return a batch now."""

    @abstractmethod
    def get(self) -> Sample:
        """One batch of the requested size; its arrays belong to the caller."""

    def drop_older(self, version: int) -> int:
        """Drop sequences of policies older than `version`; returns how many. Replay keeps its transitions."""
        return 0

    def feedback(self, keys: Array | None, priorities: Array) -> None:  # noqa: B027 - most stores have no use for it
        """Set the priorities of sampled transitions."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that the next samples depend on.

        The arrays may be the store's own: write or copy them before the next `put` or `get`.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Sizes and counts by metric name."""
