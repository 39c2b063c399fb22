"""Row buffers, one row per environment, private or shared between processes.

Observations are double-buffered: a step writes the half that does not hold the last delivered observation, so that
observation survives an environment that fails, or a process killed in the middle of a write.

`CopiedRows` carry rows between processes that share no memory, as plain arrays. The phases of the two sides need not
agree: copied rows hold the current observation, and are unpacked into the half that is current on arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from corral.core.types import Array, EnvSpec, StepBatch
from corral.envs.stepping.id_set import IdSet, SetCache
from corral.envs.stepping.row_infos import InfoPair, RowInfos
from corral.envs.supervision import Fault

_ALIGN = 64
TERMINATED, TRUNCATED, FAULTY, FIRST, GAME_OVER, MASKED = range(6)
_FLAGS_AT = 16  # bytes of the two rewards before the flags
_INT, _BOOL = np.dtype(np.int64), np.dtype(np.bool_)  # looking up a dtype costs as much as a view


class EnvRows:
    """Arrays for `num_envs` environments, carved out of one block of memory. `phase[i]` is the half of `obs` for row
    `i`'s current or next observation. The receiver flips it when it sends an action; the environment's side only reads
    it.
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
        self.table = next(taken)  # [N, 3]: reward, raw reward, and flags (bools in the bytes of a number)
        self.reward, self.raw_reward = self.table[:, 0], self.table[:, 1]
        self._flags_as_int = self.table.view(np.int64)[:, 2]
        self.flags = self.table.view(np.bool_)[:, _FLAGS_AT:]
        self.seed, self.episode, self.step = next(taken), next(taken), next(taken)
        self.mark = next(taken)  # per worker (at most N), the environment it is stepping
        self.phase = next(taken)
        self.infos: RowInfos | None = None  # values of `info`, if asked for
        self.shows_masks = False
        """Whether an environment has shown a mask of its legal actions at a reset."""
        self._odd = 0  # the receiver's copy of `phase`, as a mask
        self._cached_views = SetCache[tuple[list[list[Array]], Array]](num_envs)

    @staticmethod
    def nbytes(spec: EnvSpec, num_envs: int) -> int:
        *_, (offset, shape, dtype) = _places(spec, num_envs)
        return offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize

    def flip(self, chosen: IdSet) -> None:
        self._odd ^= chosen.mask
        half = self.half(chosen)
        if half is None:
            self.phase[chosen.index] ^= 1
        else:
            self.phase[chosen.index] = half

    def collect(self, chosen: IdSet) -> StepBatch:
        layout, ids, half = self.spec.observation, chosen.ids, self.half(chosen)
        if half is not None and isinstance(chosen.index, slice):
            halves, table = self._views(chosen)
            obs, table = [leaf.copy() for leaf in halves[half]], table.copy()
        else:  # an index array copies by itself
            obs, table = [leaf[self.phase[ids] if half is None else half, ids] for leaf in self.obs], self.table[ids]
        flags = table.view(_BOOL)[:, _FLAGS_AT:]
        flags_bytes = table.view(_INT)[:, 2].tobytes()  # comparing bytes is faster than counting numbers
        final = None
        if flags_bytes != bytes(len(flags_bytes)):
            final = self._finals(ids, obs, flags)
            self.shows_masks = self.shows_masks or bool(flags[:, MASKED].any())
        batch = StepBatch(
            ids,
            layout.unflatten(obs),
            table[:, 0],
            table[:, 1],
            flags[:, TERMINATED],
            flags[:, TRUNCATED],
            final,
            flags[:, FIRST],
            flags[:, FAULTY],
            flags[:, GAME_OVER],
        )
        if self.infos is not None:
            batch.infos, batch.first_infos = self.infos.collect(chosen.numbers)
        return batch

    def _views(self, chosen: IdSet) -> tuple[list[list[Array]], Array]:
        """Cached views of both observation halves and the table, at even steps; a new view costs as much as a copy."""
        views = self._cached_views.get(chosen)
        if views is None:
            halves = [[leaf[half][chosen.index] for leaf in self.obs] for half in (0, 1)]
            views = self._cached_views[chosen] = halves, self.table[chosen.index]
        return views

    def write_actions(self, chosen: IdSet, leaves: list[Array]) -> None:
        for row, leaf in zip(self.action, leaves, strict=True):
            row[chosen.index] = leaf

    def actions(self, chosen: IdSet) -> list[Any]:
        """One action per environment, copied, so that an environment may keep it."""
        layout = self.spec.action
        if layout.single and not layout.leaves[0].shape:
            return list(self.action[0][chosen.index])
        leaves = [
            list(rows[chosen.ids] if leaf.shape else rows[chosen.index])  # numbers are copies anyway
            for rows, leaf in zip(self.action, layout.leaves, strict=True)
        ]
        return leaves[0] if layout.single else [layout.unflatten(list(row)) for row in zip(*leaves, strict=True)]

    def no_flags(self, index: slice | Array) -> None:
        self._flags_as_int[index] = 0

    def current(self, chosen: IdSet, half: int | None) -> list[Array]:
        """Observation leaves of these rows in one half, as views for a slice; None: each row in its own half."""
        if half is None:
            return [leaf[self.phase[chosen.ids], chosen.ids] for leaf in self.obs]
        return [leaf[half][chosen.index] for leaf in self.obs]

    def last_obs(self, env_id: int) -> list[Array]:
        """Views of one row's current observation."""
        return [leaf[self.phase[env_id], env_id, ...] for leaf in self.obs]

    def state_dict(self, all_envs: IdSet) -> dict[str, Any]:
        leaves = self.current(all_envs, self.half(all_envs))
        return {
            "obs": {str(k): leaf.copy() for k, leaf in enumerate(leaves)},
            "seed": self.seed.copy(),
            "episode": self.episode.copy(),
            "step": self.step.copy(),
        }

    def load_state_dict(self, state: dict[str, Any], all_envs: IdSet) -> None:
        for k, leaf in enumerate(self.obs):
            leaf[self.phase[all_envs.ids], all_envs.ids] = state["obs"][str(k)]
        self.seed[:], self.episode[:], self.step[:] = state["seed"], state["episode"], state["step"]

    def half(self, chosen: IdSet) -> int | None:
        """The half with these rows' current observations, None if they differ."""
        odd = self._odd & chosen.mask
        return 0 if not odd else 1 if odd == chosen.mask else None

    def _finals(self, ids: Array, obs: list[Array], flags: Array) -> Any:
        ended = (flags[:, TERMINATED] | flags[:, TRUNCATED]).nonzero()[0]
        if not len(ended):
            return None  # first observations after a reset
        final = [leaf.copy() for leaf in obs]
        places = ids[ended]
        for out, leaf in zip(final, self.final, strict=True):
            out[ended] = leaf[places]
        return self.spec.observation.unflatten(final)

    def fault(self, env_id: int, kind: str, detail: str, later: int = 0) -> Fault:
        """A fault of row `env_id`, `later` steps after the last one counted."""
        state = int(self.seed[env_id]), int(self.episode[env_id]), int(self.step[env_id]) + later
        return Fault(env_id, kind, *state, detail)

    def mark_lost(self, env_id: int) -> None:
        """Make row `env_id`, whose phase already points to a new episode's first observation, a faulty row. The other
        half still holds the last delivered observation, which becomes the final one.
        """
        for final, obs in zip(self.final, self.obs, strict=True):
            final[env_id] = obs[1 - self.phase[env_id], env_id]
        self.reward[env_id] = self.raw_reward[env_id] = 0.0
        self.flags[env_id, [TERMINATED, GAME_OVER]] = False
        self.flags[env_id, [TRUNCATED, FAULTY, FIRST]] = True
        if self.infos is not None:
            self.infos.lost(env_id)


def _places(spec: EnvSpec, n: int) -> Iterator[tuple[int, tuple[int, ...], np.dtype[Any]]]:
    table = [((2, n, *leaf.shape), leaf.dtype) for leaf in spec.observation.leaves]
    table += [((n, *leaf.shape), leaf.dtype) for leaf in spec.observation.leaves]
    table += [((n, *leaf.shape), leaf.dtype) for leaf in spec.action.leaves]
    table += [((n, 3), np.dtype(np.float64))] + [((n,), np.dtype(np.int64))] * 4 + [((n,), np.dtype(np.uint8))]
    offset = 0
    for shape, dtype in table:
        yield offset, shape, dtype
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        offset += -(-size // _ALIGN) * _ALIGN


@dataclass(slots=True)
class CopiedRows:
    """Copied rows of these environments after a step or a reset."""

    env_ids: bytes  # as `IdSet.payload`
    obs: list[Array]
    table: Array
    counters: Array  # [K, 3]: seed, episode, step
    final: list[Array] | None  # of the ended episodes, in order
    infos: dict[int, InfoPair] | None = None


def pack(rows: EnvRows, chosen: IdSet) -> CopiedRows:
    """Copy these rows."""
    ids = chosen.ids
    ended = ids[_ended(rows, ids)]
    return CopiedRows(
        chosen.payload,
        [leaf[rows.phase[ids], ids] for leaf in rows.obs],
        rows.table[ids],
        np.stack([rows.seed[ids], rows.episode[ids], rows.step[ids]], axis=1),
        [leaf[ended] for leaf in rows.final] if len(ended) else None,
        None if rows.infos is None else rows.infos.take(chosen.numbers),
    )


def unpack(rows: EnvRows, chosen: IdSet, copied: CopiedRows) -> None:
    """Write copied rows of these environments to their place."""
    ids = chosen.ids
    for leaf, value in zip(rows.obs, copied.obs, strict=True):
        leaf[rows.phase[ids], ids] = value
    rows.table[ids] = copied.table
    rows.seed[ids], rows.episode[ids], rows.step[ids] = copied.counters.T
    if copied.final is not None:
        ended = ids[_ended(rows, ids)]
        for leaf, value in zip(rows.final, copied.final, strict=True):
            leaf[ended] = value
    if rows.infos is not None and copied.infos is not None:
        rows.infos.put(copied.infos)


def _ended(rows: EnvRows, ids: Array) -> Array:
    flags: Array = rows.flags[ids]
    ended: Array = flags[:, TERMINATED] | flags[:, TRUNCATED]
    return ended
