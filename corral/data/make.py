"""Choose the store for an algorithm."""

from __future__ import annotations

from corral.core.errors import UserError
from corral.core.types import DataSpec, EnvSpec
from corral.data.episodes import EpisodeStore
from corral.data.fifo import FifoStore
from corral.data.game_replay import GameReplay
from corral.data.mixed import MixedStore
from corral.data.store import Store
from corral.data.transition_replay import TransitionReplay


def make_store(spec: EnvSpec, data: DataSpec, num_envs: int, seed: int = 0) -> Store:
    """The store for an algorithm's `DataSpec`."""
    if (data.unit, data.reuse) == ("transition", "replay"):
        return TransitionReplay(spec, data, num_envs, seed)
    if (data.unit, data.reuse) == ("sequence", "once"):
        return MixedStore(spec, data, num_envs, seed) if data.replayed else FifoStore(spec, data, num_envs)
    if (data.unit, data.reuse) == ("episode", "once"):
        return EpisodeStore(spec, data, num_envs)
    if (data.unit, data.reuse) == ("episode", "replay"):
        return GameReplay(spec, data, num_envs, seed)
    raise UserError(
        f"There is no store for unit '{data.unit}' with reuse '{data.reuse}': transitions and episodes are "
        "replayed, sequences and episodes are used once."
    )
