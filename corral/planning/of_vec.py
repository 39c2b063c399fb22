"""Which states environments have: what a planner that acts for them works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from corral.core.errors import UserError
from corral.core.gym_env import PassiveWrapper, layers
from corral.core.types import EnvSpec
from corral.envs.backends.local import LocalVecEnv
from corral.envs.backends.simulators.states import LinkStates
from corral.envs.backends.simulators.vec_env import LinkVecEnv
from corral.envs.normalize import NormalizedVecEnv
from corral.envs.suites.games.game import Game
from corral.envs.suites.games.pettingzoo import AecEnv
from corral.envs.vec_env import VecEnv
from corral.planning.aec_states import AecStates
from corral.planning.game_states import GameStates
from corral.snapshot.array_states import RowStates, has_rows
from corral.snapshot.env_states import EnvStates
from corral.snapshot.keepers.choose import make_scratch
from corral.snapshot.states import States


def states_of(vec: VecEnv, memory_mb: float = 1024.0) -> States:
    """States of its environments, by env id; UserError where they cannot be saved."""
    if isinstance(vec, NormalizedVecEnv):
        if vec.normalises_obs:
            raise UserError("A search sees observations as the environment gives them: let the network normalise them.")
        return states_of(vec.inside, memory_mb)
    if isinstance(vec, LinkVecEnv):
        return LinkStates(vec, memory_mb)
    if isinstance(vec, LocalVecEnv):
        special = special_states(vec.environment, vec.num_envs, vec.spec, memory_mb)
        if special is not None:
            return special
        factories = [vec.factory(i) for i in range(vec.num_envs)]
        makers = {id(factory): partial(make_scratch, factory) for factory in factories}
        acting = [vec.acting(i) for i in range(vec.num_envs)]
        return EnvStates(vec.spec, acting, [makers[id(factory)] for factory in factories], memory_mb)
    raise UserError(
        f"A search saves and restores environments, and {vec.spec.name} cannot be in {type(vec).__name__}: run it in "
        "this process, with backend=local; several actors search side by side."
    )


def special_states(
    environment: Callable[[int], gymnasium.Env[Any, Any]], num_envs: int, spec: EnvSpec, memory_mb: float
) -> States | None:
    """States of environments that are more than Gymnasium asks for, games and functions of rows; None of others."""
    inside: Any = _Inside(environment, num_envs)
    game = getattr(inside[0], "game", None)
    if isinstance(game, Game) or isinstance(inside[0], AecEnv):
        _require_bare(environment(0), spec.name)
        return GameStates(game, inside, memory_mb) if isinstance(game, Game) else AecStates(inside, memory_mb)
    return RowStates(environment, spec, memory_mb) if has_rows(environment(0)) else None


def _require_bare(env: gymnasium.Env[Any, Any], name: str) -> None:
    """UserError when something around a game makes it another one than its rules say, or shows it otherwise."""
    for layer in layers(env):
        if isinstance(layer, gymnasium.Wrapper) and not isinstance(
            layer, (OrderEnforcing, PassiveEnvChecker, PassiveWrapper)
        ):
            raise UserError(
                f"A search of {name} goes by the game's own rules, which {type(layer).__name__} changes: leave it out."
            )


class _Inside(Sequence[Any]):
    """Environments without their wrappers, each as it is when it is asked for: a lost one is replaced."""

    def __init__(self, environment: Callable[[int], gymnasium.Env[Any, Any]], count: int):
        self._environment, self._count = environment, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._environment(index).unwrapped
