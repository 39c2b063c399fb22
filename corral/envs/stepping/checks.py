"""Checks of environments' results before they are stored: observations, rewards, infos, the tuple of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from corral.core.errors import UserError
from corral.core.gym_env import unpack_step
from corral.core.types import Array
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.rows import EnvRows

_LONGEST = 80  # characters of a value in a message


def all_finite(arrays: list[Array]) -> bool:
    """Whether every number is finite."""
    # Counting is several times faster than all() on small arrays.
    return all(np.count_nonzero(np.isfinite(array)) == array.size for array in arrays)


class RowChecks:
    """Finds observations with non-finite numbers, or with discrete values outside their space, in rows; and mistakes of
    the environments, which are named `name` in messages.
    """

    def __init__(self, rows: EnvRows, name: str):
        self._rows, self._layout, self._name = rows, rows.spec.observation, name
        self._floats = [k for k, leaf in enumerate(self._layout.leaves) if leaf.dtype.kind == "f"]
        self._halves = [(rows.obs[k][0], rows.obs[k][1]) for k in self._floats]
        self._discrete = [(leaf, (rows.obs[k][0], rows.obs[k][1])) for k, leaf in self._layout.discrete]

    def current(self, chosen: IdSet, half: int | None) -> bool:
        if half is None:
            return self._good(self._rows.current(chosen, half))
        for halves in self._halves:
            values = halves[half][chosen.index]
            if np.count_nonzero(np.isfinite(values)) != values.size:
                return False
        return all(leaf.in_range(halves[half][chosen.index]) for leaf, halves in self._discrete)

    def obs(self, env_id: int) -> bool:
        return self._good(self._rows.last_obs(env_id))

    def finals(self, env_ids: list[int]) -> bool:
        return self._good([leaf[env_ids] for leaf in self._rows.final])

    def describe(self, where: str, views: list[Array], reward: float | None = None) -> tuple[str, str]:
        """Kind and detail of the fault of an environment that returned such an observation or reward."""
        if found := self._layout.range_problem(views):
            return "range", f"{where} returned: {found}"
        return "nan", f"{where} returned {'' if reward is None else f'reward {reward}, '}observation {views}"

    def _good(self, leaves: list[Array]) -> bool:
        finite = all_finite([leaves[k] for k in self._floats])
        return finite and all(leaf.in_range(leaves[k]) for k, leaf in self._layout.discrete)

    def scalar(self, reward: Any, env_id: int) -> float:
        """A reward as a number; UserError if it is not one number."""
        array = np.asarray(reward)
        if array.size != 1 or array.dtype.kind not in "fiub":
            raise UserError(
                f"Environment {env_id} ({self._name}): the reward must be one number, got {_short(reward)}."
            )
        return float(array.reshape(()))

    def flags(self, terminated: Any, truncated: Any, env_id: int) -> tuple[bool, bool]:
        """The flags of a step at which an episode ended; UserError if one is neither true nor false."""
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if type(value) is bool or type(value) is np.bool_ or not value:
                continue
            array = np.asarray(value)
            if array.size != 1 or array.dtype.kind not in "fiub" or array.item() != 1:
                raise UserError(
                    f"Environment {env_id} ({self._name}): {name} must be True or False, got {_short(value)}."
                )
        return bool(terminated), bool(truncated)

    def read_info(self, info: Any, env_id: int) -> tuple[float | None, bool]:
        """The unclipped reward in a step's info, if present, and whether a life was lost."""
        if not isinstance(info, Mapping):
            raise UserError(f"Environment {env_id} ({self._name}): info must be a dict, got {info!r}.")
        raw_reward = self.scalar(info["raw_reward"], env_id) if "raw_reward" in info else None
        return raw_reward, bool(info.get("life_lost", False))

    def leaves(self, obs: Any, env_id: int) -> list[Array]:
        """An observation as arrays; UserError if a leaf would be broadcast or wrapped around."""
        try:
            values = [np.asarray(value) for value in self._layout.flatten(obs)]
        except (KeyError, IndexError, TypeError, ValueError):
            values = []
        fits = len(values) == len(self._layout.leaves) and all(
            value.shape == leaf.shape and leaf.takes(value)
            for value, leaf in zip(values, self._layout.leaves, strict=True)
        )
        if not fits:
            found = self._layout.problem(obs) or f"observation does not fit its space {self._layout.space}"
            raise UserError(f"Environment {env_id} ({self._name}): {found}.")
        return values

    def require_good_reset(self, obs: Any, env_id: int) -> None:
        """UserError unless a first observation is in its space and finite."""
        if found := self._layout.problem(obs):
            raise UserError(f"Environment {env_id} ({self._name}), at reset: {found}.")
        leaves = self._layout.flatten(obs)
        if not all_finite([np.asarray(leaves[k]) for k in self._floats]):
            raise UserError(f"Environment {env_id} ({self._name}): its first observation is not finite; check reset().")

    def require_step_tuple(self, error: BaseException, env_id: int) -> None:
        """UserError if a step failed because it did not return five values, and not inside the environment."""
        trace = error.__traceback__
        unpacking = isinstance(error, (ValueError, TypeError)) and "unpack" in str(error)
        if unpacking and trace is not None and trace.tb_next is None:
            unpack_step(None, f"Environment {env_id} ({self._name})")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
