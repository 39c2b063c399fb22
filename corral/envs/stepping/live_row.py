"""`LiveEnv` of an environment in a group: its row holds its last observation, and the group records its actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corral.core.types import Array
from corral.snapshot.keeper import Env, EpisodeStart
from corral.snapshot.live_env import LiveEnv

if TYPE_CHECKING:
    from corral.envs.stepping.group import EnvGroup


class RowEnv(LiveEnv):
    """An environment by its id; the group may rebuild it, and starts the next episode as soon as one ends."""

    over = False

    def __init__(self, group: EnvGroup, env_id: int):
        self._group, self._env_id = group, env_id

    @property
    def env(self) -> Env:
        return self._group.environment(self._env_id)

    def record(self) -> None:
        self._group.record()

    def last_obs(self) -> list[Array]:
        return [view.copy() for view in self._group.last_obs(self._env_id)]

    def episode_start(self) -> EpisodeStart | None:
        return self._group.episode_start(self._env_id)

    def on_load(self, obs: list[Array] | None, over: bool, start: EpisodeStart | None) -> None:
        """Write the observation to the row. How to repeat its episode is unknown until the next one."""
        assert obs is not None  # a row always has one
        self._group.replace(self._env_id, self.env, obs)
        self._group.forget(self._env_id)
