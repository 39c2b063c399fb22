"""Rows between processes that share no memory: copies of some environments' rows, as plain arrays.

The two sides' halves of the observations (`Rows.phase`) need not agree: a parcel has the current observation, and
goes into the half that is current where it arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from corral.core.types import Array
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.rows import TERMINATED, TRUNCATED, Rows


@dataclass(slots=True)
class RowParcel:
    """What a step, or a first observation, of these environments left in their rows."""

    env_ids: bytes  # as `IdSet.payload`
    obs: list[Array]
    table: Array
    counters: Array  # [K, 3]: seed, episode, step
    final: list[Array] | None  # of those whose episode ended, in order


def pack(rows: Rows, chosen: IdSet) -> RowParcel:
    """Copy these rows."""
    ids = chosen.ids
    ended = ids[_ended(rows, ids)]
    return RowParcel(
        chosen.payload,
        [leaf[rows.phase[ids], ids] for leaf in rows.obs],
        rows.table[ids],
        np.stack([rows.seed[ids], rows.episode[ids], rows.step[ids]], axis=1),
        [leaf[ended] for leaf in rows.final] if len(ended) else None,
    )


def unpack(rows: Rows, chosen: IdSet, parcel: RowParcel) -> None:
    """Put a parcel of these environments into their rows."""
    ids = chosen.ids
    for leaf, value in zip(rows.obs, parcel.obs, strict=True):
        leaf[rows.phase[ids], ids] = value
    rows.table[ids] = parcel.table
    rows.seed[ids], rows.episode[ids], rows.step[ids] = parcel.counters.T
    if parcel.final is not None:
        ended = ids[_ended(rows, ids)]
        for leaf, value in zip(rows.final, parcel.final, strict=True):
            leaf[ended] = value


def _ended(rows: Rows, ids: Array) -> Array:
    flags: Array = rows.flags[ids]
    ended: Array = flags[:, TERMINATED] | flags[:, TRUNCATED]
    return ended
