"""A store of whole episodes, assembled from fragments and used once."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from corral.core.errors import RunFailed
from corral.core.types import Array, DataSpec, EnvSpec, Sample, Trajectory, Tree, tree_map
from corral.data.pack import pack_all, unpack_all
from corral.data.store import START, Store, StoreContext, count_metrics, named_extras

_log = logging.getLogger("corral")
_LONGEST = 10_000
_PER_STEP = ("action", "reward", "raw_reward", "terminated", "truncated", "faulty", "first", "extras")


class EpisodeStore(Store):
    """Returns batches of `batch_size` whole episodes, in the order in which they ended.

    A batch is as long as its longest episode. Rows after an episode's end are padding: marked faulty, with reward 0,
    and otherwise copies of its last action and observation. Episodes with a faulty row, or without a known beginning,
    are dropped.

    The size is bounded: an episode is truncated after `max_length` steps and continues as another one, and `room` is
    false while two batches wait; `put` then raises an error.
    """

    def __init__(
        self,
        spec: EnvSpec,
        data: DataSpec,
        num_envs: int,
        max_length: int | None = None,
        optional: tuple[str, ...] = (),
    ):
        self._spec, self._data, self._optional = spec, data, optional
        self._max_length = max_length or min(spec.max_episode_steps or _LONGEST, _LONGEST)
        # Per environment, the pieces of its current episode, one column each; None: its beginning is unknown.
        self._open: list[list[Trajectory] | None] = [None] * num_envs
        self._queue: deque[Trajectory] = deque()
        self._inserted = self._sampled = self._dropped = 0
        self._warned = False

    def put(self, traj: Trajectory, priorities: Array | None = None, ctx: StoreContext = START) -> None:
        if not self.room():
            raise RunFailed(
                f"The store is full: {len(self._queue)} episodes wait for batches of {self._data.batch_size}. Check "
                "room() before put(), or take batches more often."
            )
        traj = replace(traj, extras=named_extras(traj, self._data.extras, self._optional))
        successors = traj.next_obs()
        for column, env_id in enumerate(traj.env_id):
            pieces = self._open[env_id]
            if pieces and not _follows(pieces[-1], traj, column):
                self._dropped += 1
                self._open[env_id] = None
            self._put_column(traj, successors, column)

    def room(self) -> bool:
        return len(self._queue) < 2 * self._data.batch_size

    def ready(self) -> bool:
        return len(self._queue) >= self._data.batch_size

    def get(self) -> Sample:
        count = self._data.batch_size
        if not self.ready():
            raise RunFailed(f"Only {len(self._queue)} of {count} episodes are available: check ready() before get().")
        self._sampled += count
        return Sample(_pad([self._queue.popleft() for _ in range(count)]))

    def _put_column(self, traj: Trajectory, successors: Tree, column: int) -> None:
        env_id = traj.env_id[column]
        ends = np.flatnonzero(traj.done[:, column] | traj.faulty[:, column]) + 1
        start = 0
        for stop in sorted({*ends.tolist(), traj.shape[0]}):
            while start < stop:
                pieces = self._open[env_id]
                if pieces is None and not traj.first[start, column]:
                    start = stop
                    continue
                pieces = pieces or []
                upto = min(stop, start + self._max_length - _steps(pieces))
                pieces.append(_piece(traj, successors, column, slice(start, upto)))
                self._open[env_id] = self._close(pieces)
                start = upto

    def _close(self, pieces: list[Trajectory]) -> list[Trajectory] | None:
        """Queue an episode that is complete or too long; return the pieces of the one that continues."""
        last = pieces[-1]
        if last.faulty[-1, 0]:
            self._dropped += 1
            return None
        ended = last.done[-1, 0]
        if not ended and _steps(pieces) < self._max_length:
            return pieces
        episode = _join(pieces)
        if not ended:
            episode.truncated[-1] = True
            if not self._warned:
                _log.warning("An episode did not end within %d steps; such ones are truncated there.", self._max_length)
            self._warned = True
        self._queue.append(episode)
        self._inserted += 1
        return None if ended else []

    def metrics(self) -> dict[str, float]:
        counts = count_metrics(len(self._queue), self._inserted, self._sampled)
        return counts | {"store/dropped": float(self._dropped)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "inserted": self._inserted,
            "sampled": self._sampled,
            "dropped": self._dropped,
            "queue": pack_all(self._queue, self._spec),
            "open": {str(i): pack_all(pieces, self._spec) for i, pieces in enumerate(self._open) if pieces is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inserted, self._sampled, self._dropped = state["inserted"], state["sampled"], state["dropped"]
        self._queue = deque(unpack_all(state["queue"], self._spec))
        opened = {int(i): unpack_all(pieces, self._spec) for i, pieces in state["open"].items()}
        self._open = [opened.get(i) for i in range(len(self._open))]


def _steps(pieces: list[Trajectory]) -> int:
    return sum(piece.shape[0] for piece in pieces)


def _follows(piece: Trajectory, traj: Trajectory, column: int) -> bool:
    """Whether a fragment continues a piece."""
    same: list[bool] = []
    tree_map(lambda a, b: same.append(np.array_equal(a[-1, 0], b[0, column])), piece.obs, traj.obs)
    return all(same) and not traj.first[0, column]


def _piece(traj: Trajectory, successors: Tree, column: int, rows: slice) -> Trajectory:
    """Copy some rows of one column. Its `obs` ends with the true successor, so it has no final observations."""
    one = slice(column, column + 1)

    def observations(obs: Array, following: Array) -> Array:
        return np.concatenate([obs[rows, one], following[rows, one][-1:]])

    return Trajectory(
        obs=tree_map(observations, traj.obs, successors),
        # `first` has [T, 1] as well: that of the successor is meaningless.
        **{name: tree_map(lambda leaf: leaf[rows, one].copy(), getattr(traj, name)) for name in _PER_STEP},
        env_id=traj.env_id[one].copy(),
        final_at=np.zeros((0, 2), np.int64),
        final_obs=tree_map(lambda leaf: leaf[:0].copy(), traj.final_obs),
        version=np.broadcast_to(traj.version, traj.env_id.shape)[one].copy(),
    )


def _join(pieces: list[Trajectory]) -> Trajectory:
    """Concatenate the pieces of an episode. The version is the oldest."""

    def join(*leaves: Array) -> Array:
        return np.concatenate(leaves)

    first = pieces[0]
    heads = [tree_map(lambda leaf: leaf[:-1], piece.obs) for piece in pieces[:-1]]
    return Trajectory(
        obs=tree_map(join, *heads, pieces[-1].obs),
        **{name: tree_map(join, *(getattr(piece, name) for piece in pieces)) for name in _PER_STEP},
        env_id=first.env_id,
        final_at=first.final_at,
        final_obs=first.final_obs,
        version=np.minimum.reduce([piece.version for piece in pieces]),
    )


def _pad(episodes: list[Trajectory]) -> Trajectory:
    """Episodes side by side, padded to the longest."""
    lengths = np.array([episode.shape[0] for episode in episodes])
    length, width = int(lengths.max()), len(episodes)

    def repeated(*leaves: Array) -> Array:
        """Pad with the last row of each."""
        extra = len(leaves[0]) - lengths[0]  # observations have one row more
        result = np.empty((length + extra, width, *leaves[0].shape[2:]), leaves[0].dtype)
        for column, leaf in enumerate(leaves):
            result[: len(leaf), column] = leaf[:, 0]
            result[len(leaf) :, column] = leaf[-1, 0]
        return result

    def filled(name: str, value: Any, rows: int = length) -> Any:
        leaves = [getattr(episode, name) for episode in episodes]
        result = np.full((rows, width), value, leaves[0].dtype)
        for column, leaf in enumerate(leaves):
            result[: len(leaf), column] = leaf[:, 0]
        return result

    first = filled("first", False, length + 1)
    first[lengths, np.arange(width)] = True  # as after any episode end
    padding = {"reward": 0, "raw_reward": 0, "terminated": False, "truncated": False, "faulty": True}
    return Trajectory(
        **{name: tree_map(repeated, *(getattr(e, name) for e in episodes)) for name in ("obs", "action", "extras")},
        **{name: filled(name, value) for name, value in padding.items()},
        first=first,
        env_id=np.concatenate([episode.env_id for episode in episodes]),
        final_at=np.stack([lengths - 1, np.arange(width)], 1),
        final_obs=tree_map(lambda *obs: np.concatenate([leaf[-1] for leaf in obs]), *(e.obs for e in episodes)),
        version=np.concatenate([episode.version for episode in episodes]),
    )
