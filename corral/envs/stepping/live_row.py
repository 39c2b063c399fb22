"""An environment of a group: what it showed is in its row, and its actions are recorded there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corral.core.types import Array
from corral.snapshot.keeper import Env, EpisodeStart
from corral.snapshot.live_env import LiveEnv

if TYPE_CHECKING:
    from corral.envs.stepping.group import EnvGroup


class RowEnv(LiveEnv):
    """By its id; the group may build it anew. Ended episodes are followed by others at once."""

    over = False

    def __init__(self, group: EnvGroup, env_id: int):
        self._group, self._env_id = group, env_id

    @property
    def env(self) -> Env:
        """As it is now."""
        return self._group.environment(self._env_id)

    def record(self) -> None:
        """Let the group record."""
        self._group.record()

    def shown(self) -> list[Array]:
        """From its row."""
        return [view.copy() for view in self._group.shown(self._env_id)]

    def beginning(self) -> EpisodeStart | None:
        """As the group recorded it."""
        return self._group.beginning(self._env_id)

    def loaded(self, obs: list[Array] | None, over: bool, beginning: EpisodeStart | None) -> None:
        """Show it in the row. Until its next game it is not known what leads there."""
        assert obs is not None  # rows always show something
        self._group.replace(self._env_id, self.env, obs)
        self._group.forget(self._env_id)
