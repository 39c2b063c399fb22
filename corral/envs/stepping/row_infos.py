"""Chosen values of environments' infos, by row, on their way to the receiver."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array, unstack_infos

InfoPair = tuple[dict[str, Any] | None, dict[str, Any]]
"""The chosen values of a row's step, None if no step led to it, and of the reset that began a new episode."""


class RowInfos:
    """The values with these names, of each row that was not received yet."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self._rows: dict[int, InfoPair] = {}

    def stepped(self, env_id: int, info: Mapping[str, Any]) -> None:
        self._rows[env_id] = self._chosen(info), {}

    def began(self, env_id: int, info: Mapping[str, Any]) -> None:
        """Note the info of a reset, after that of the step that ended the last episode, if there was one."""
        self._rows[env_id] = self._rows.get(env_id, (None,))[0], self._chosen(info)

    def stepped_rows(self, env_ids: Array, infos: Mapping[str, Any], chosen: Array | None = None) -> None:
        """The same for infos of these environments in Gymnasium's vectorized format, or for the chosen ones of them."""
        for env_id, info in self._rows_of(env_ids, infos, chosen):
            self.stepped(env_id, info)

    def began_rows(self, env_ids: Array, infos: Mapping[str, Any], chosen: Array | None = None) -> None:
        for env_id, info in self._rows_of(env_ids, infos, chosen):
            self.began(env_id, info)

    def lost(self, env_id: int) -> None:
        """The step did not happen."""
        self._rows[env_id] = {}, self._rows.get(env_id, (None, {}))[1]

    def forget(self, env_id: int) -> None:
        self._rows.pop(env_id, None)

    def clear(self) -> None:
        self._rows.clear()

    def take(self, env_ids: Iterable[int]) -> dict[int, InfoPair]:
        return {i: self._rows.pop(i) for i in env_ids if i in self._rows}

    def put(self, pairs: Mapping[int, InfoPair]) -> None:
        self._rows.update(pairs)

    def collect(self, env_ids: Iterable[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """`infos` and `first_infos` of a batch of these rows."""
        pairs = [self._rows.pop(i, (None, {})) for i in env_ids]
        return [first if step is None else step for step, first in pairs], [first for _, first in pairs]

    def _rows_of(
        self, env_ids: Array, infos: Mapping[str, Any], chosen: Array | None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        wanted = {key: infos[key] for name in self.names for key in (name, f"_{name}") if key in infos}
        rows = unstack_infos(wanted, len(env_ids))
        for k in range(len(env_ids)) if chosen is None else np.flatnonzero(chosen).tolist():
            yield int(env_ids[k]), rows[k]

    def _chosen(self, info: Mapping[str, Any]) -> dict[str, Any]:
        chosen = {name: info[name] for name in self.names if name in info}
        try:
            return copy.deepcopy(chosen)  # an environment may reuse its arrays and dicts
        except Exception as error:
            raise UserError(
                f"The infos {', '.join(chosen)} cannot be copied ({error}): ask for others in make_vec(info=...)."
            ) from error
