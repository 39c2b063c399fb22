"""One row of memory per environment, private or shared between processes.

Observations are double-buffered: a step writes the half that the last delivered observation is not in, so
that observation survives an environment that fails, or a process killed in the middle of a write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from corral.types import Array, EnvSpec, StepBatch

_ALIGN = 64
TERMINATED, TRUNCATED, FAULTY, FIRST, GAME_OVER = range(5)
# Everything about a row but its observation, side by side, so that one copy takes it all.
_RECORD = np.dtype([("reward", "f8"), ("raw_reward", "f8"), ("flags", "?", (8,))])


class Rows:
    """Arrays for `num_envs` environments, carved out of one block of memory.

    `phase[i]` says which half of `obs` holds, or will hold, row `i`'s current observation. The receiver flips
    it when it sends an action; the environment's side only reads it.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, memory: Any = None):
        self.spec, self.num_envs = spec, num_envs
        if memory is None:
            memory = bytearray(self.nbytes(spec, num_envs))
        arrays = [np.ndarray(shape, dtype, memory, offset) for offset, shape, dtype in _places(spec, num_envs)]
        taken = iter(arrays)
        self.obs = [next(taken) for _ in spec.observation.leaves]  # [2, N, ...]
        self.final = [next(taken) for _ in spec.observation.leaves]  # [N, ...]
        self.action = [next(taken) for _ in spec.action.leaves]  # [N, ...]
        self.records = next(taken)  # [N]
        self.reward, self.raw_reward, self.flags = (self.records[name] for name in _RECORD.names or ())
        self.seed, self.episode, self.step = next(taken), next(taken), next(taken)
        self.mark = next(taken)  # per worker (of which there are at most N), the environment it is stepping
        self.phase = next(taken)

    @staticmethod
    def nbytes(spec: EnvSpec, num_envs: int) -> int:
        """Bytes of memory that the rows need."""
        *_, (offset, shape, dtype) = _places(spec, num_envs)
        return offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize

    def collect(self, ids: Array, index: slice | Array) -> StepBatch:
        """Copy the rows `ids` out; `index` is the same rows as a slice where they are one."""
        layout = self.spec.observation
        # A slice gives views, which are copied; an index array copies by itself.
        own = isinstance(index, slice)
        obs = [leaf.copy() if own else leaf for leaf in self.current(ids, index)]
        records = self.records[index].copy() if own else self.records[index]
        flags = records["flags"]
        first = flags[:, FIRST]
        final = self._finals(ids, obs, flags) if first.any() else None
        return StepBatch(
            ids,
            layout.unflatten(obs),
            records["reward"],
            records["raw_reward"],
            flags[:, TERMINATED],
            flags[:, TRUNCATED],
            final,
            first,
            flags[:, FAULTY],
            flags[:, GAME_OVER],
        )

    def current(self, ids: Array, index: slice | Array) -> list[Array]:
        """Leaves of these rows' current observations; views for a slice of rows in one phase, else copies."""
        phase = self.phase[index]
        half = phase[0]
        if (phase == half).all():
            return [leaf[half][index] for leaf in self.obs]
        return [leaf[phase, ids] for leaf in self.obs]

    def _finals(self, ids: Array, obs: list[Array], flags: Array) -> Any:
        ended = flags[:, TERMINATED] | flags[:, TRUNCATED]
        if not ended.any():
            return None  # first observations after a reset
        final = [leaf.copy() for leaf in obs]
        places = ids[ended]
        for out, leaf in zip(final, self.final, strict=True):
            out[ended] = leaf[places]
        return self.spec.observation.unflatten(final)

    def mark_lost(self, env_id: int) -> None:
        """Turn row `env_id`, whose phase already points to a new episode's first observation, into a faulty row.

        The other half still holds the last observation that was delivered: it becomes the final one.
        """
        for final, obs in zip(self.final, self.obs, strict=True):
            final[env_id] = obs[1 - self.phase[env_id], env_id]
        self.reward[env_id] = self.raw_reward[env_id] = 0.0
        self.flags[env_id, [TERMINATED, GAME_OVER]] = False
        self.flags[env_id, [TRUNCATED, FAULTY, FIRST]] = True


def row_index(ids: Array) -> slice | Array:
    """The same rows as a slice, which is cheaper to read and write, where they are evenly spaced."""
    if len(ids) == 1:
        return slice(int(ids[0]), int(ids[0]) + 1)
    steps = np.diff(ids)
    if steps[0] > 0 and (steps == steps[0]).all():
        return slice(int(ids[0]), int(ids[-1]) + 1, int(steps[0]))
    return ids


def _places(spec: EnvSpec, n: int) -> Iterator[tuple[int, tuple[int, ...], np.dtype[Any]]]:
    table = [((2, n, *leaf.shape), leaf.dtype) for leaf in spec.observation.leaves]
    table += [((n, *leaf.shape), leaf.dtype) for leaf in spec.observation.leaves]
    table += [((n, *leaf.shape), leaf.dtype) for leaf in spec.action.leaves]
    table += [((n,), _RECORD)] + [((n,), np.dtype(np.int64))] * 4 + [((n,), np.dtype(np.uint8))]
    offset = 0
    for shape, dtype in table:
        yield offset, shape, dtype
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        offset += -(-size // _ALIGN) * _ALIGN
