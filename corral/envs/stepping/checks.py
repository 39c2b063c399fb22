"""Checks of an environment's results before they are stored: observations, rewards, infos, the tuple of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from corral.core.errors import UserError
from corral.core.gym_env import unpack_step
from corral.core.spaces import Layout
from corral.core.types import Array
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.rows import EnvRows


def all_finite(arrays: list[Array]) -> bool:
    """Whether every number is finite."""
    # Counting is several times faster than all() on small arrays.
    return all(np.count_nonzero(np.isfinite(array)) == array.size for array in arrays)


class FiniteRows:
    """Finds non-finite numbers in rows."""

    def __init__(self, rows: EnvRows):
        self._rows = rows
        self._leaves = [k for k, leaf in enumerate(rows.spec.observation.leaves) if leaf.dtype.kind == "f"]
        self._halves = [(rows.obs[k][0], rows.obs[k][1]) for k in self._leaves]

    def current(self, chosen: IdSet, half: int | None) -> bool:
        if half is None:
            current = self._rows.current(chosen, half)
            return all_finite([current[k] for k in self._leaves])
        for halves in self._halves:
            values = halves[half][chosen.index]
            if np.count_nonzero(np.isfinite(values)) != values.size:
                return False
        return True

    def obs(self, env_id: int) -> bool:
        half = self._rows.phase[env_id]
        return all_finite([halves[half][env_id] for halves in self._halves])

    def finals(self, env_ids: list[int]) -> bool:
        return all_finite([self._rows.final[k][env_id] for env_id in env_ids for k in self._leaves])


def scalar(reward: Any, env_id: int, name: str) -> float:
    """A reward as a number; UserError if it is not one number."""
    array = np.asarray(reward)
    if array.size != 1 or array.dtype.kind not in "fiub":
        raise UserError(f"Environment {env_id} ({name}): the reward must be one number, got {reward!r}.")
    return float(array.reshape(()))


def read_info(info: Any, env_id: int, name: str) -> tuple[float | None, bool]:
    """The unclipped reward in a step's info, if present, and whether a life was lost."""
    if not isinstance(info, Mapping):
        raise UserError(f"Environment {env_id} ({name}): info must be a dict, got {info!r}.")
    raw_reward = scalar(info["raw_reward"], env_id, name) if "raw_reward" in info else None
    return raw_reward, bool(info.get("life_lost", False))


def observation_leaves(layout: Layout, obs: Any, env_id: int, name: str) -> list[Array]:
    """An observation as arrays; UserError if a leaf would be broadcast or wrapped around."""
    try:
        values = [np.asarray(value) for value in layout.flatten(obs)]
    except (KeyError, IndexError, TypeError, ValueError):
        values = []
    fits = len(values) == len(layout.leaves) and all(
        value.shape == leaf.shape and leaf.takes(value) for value, leaf in zip(values, layout.leaves, strict=True)
    )
    if not fits:
        found = layout.problem(obs) or f"observation does not fit its space {layout.space}"
        raise UserError(f"Environment {env_id} ({name}): {found}.")
    return values


def require_good_reset(layout: Layout, obs: Any, env_id: int, name: str) -> None:
    """UserError unless a first observation is in its space and finite."""
    if found := layout.problem(obs):
        raise UserError(f"Environment {env_id} ({name}), at reset: {found}.")
    leaves = [np.asarray(leaf) for leaf in layout.flatten(obs)]
    floats = [value for value, leaf in zip(leaves, layout.leaves, strict=True) if leaf.dtype.kind == "f"]
    if not all_finite(floats):
        raise UserError(f"Environment {env_id} ({name}): its first observation is not finite; check reset().")


def require_step_tuple(error: BaseException, env_id: int, name: str) -> None:
    """UserError if a step failed because it did not return five values, and not inside the environment."""
    trace = error.__traceback__
    unpacking = isinstance(error, (ValueError, TypeError)) and "unpack" in str(error)
    if unpacking and trace is not None and trace.tb_next is None:
        unpack_step(None, f"Environment {env_id} ({name})")
