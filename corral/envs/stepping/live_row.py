"""An environment of a group, as searches and keepers see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium

from corral.core.types import Array
from corral.snapshot.keeper import EpisodeStart
from corral.snapshot.live_env import LiveEnv

if TYPE_CHECKING:
    from corral.envs.stepping.group import EnvGroup


class RowEnv(LiveEnv):
    """An environment of a group, which may rebuild it, and starts the next episode as soon as one ends."""

    over = False

    def __init__(self, group: EnvGroup, env_id: int):
        self._group, self._env_id = group, env_id

    @property
    def env(self) -> gymnasium.Env[Any, Any]:
        return self._group.envs[self._env_id]

    def record(self) -> None:
        self._group.record()

    def last_obs(self) -> list[Array]:
        return [view.copy() for view in self._group.rows.last_obs(self._env_id)]

    def episode_start(self) -> EpisodeStart | None:
        recorder = self._group.recorder
        return None if recorder is None else recorder.episode_start(self._env_id, self.env)

    def on_load(self, obs: list[Array] | None, over: bool, start: EpisodeStart | None) -> None:
        assert obs is not None  # a row always has one
        self._group.replace(self._env_id, self.env, obs)
