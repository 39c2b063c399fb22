"""RLlib on Corral's environments: anything `make_vec` takes, registered under a name for RLlib.

```python
corral.envs.rllib.register("my-env", "CartPole-v1")
config = PPOConfig().environment("my-env").env_runners(gym_env_vectorize_mode="vector_entry_point")
```

With that mode a runner's environments are one VecEnv. Without it RLlib combines VecEnvs of one environment each, which
gives the same results more slowly.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from corral.core.errors import UserError
from corral.core.types import Tree
from corral.envs.adapters.as_gymnasium import INFOS, HeldRows, ResetSeeds
from corral.envs.backends.simulators.options import is_url
from corral.envs.make import make_vec
from corral.envs.resolve import EnvLike
from corral.envs.vec_env import VecEnv


def register(name: str, env: EnvLike, **kwargs: Any) -> None:
    """Register an environment for RLlib's `config.environment(name)`.

    Args:
        name: for RLlib.
        env: a Gymnasium id, `module:Class`, a factory, a suite or the URL of simulators, as for `corral.make_vec`.
        kwargs: further arguments of `make_vec`. The default backend is `local`, because RLlib's runners are processes.
            RLlib sets the number of environments and their seed (`num_envs_per_env_runner`,
            `config.debugging(seed=...)`) and passes `env_config` to the environment.
    """
    for key, instead in (("seed", "config.debugging(seed=...)"), ("num_envs", "num_envs_per_env_runner")):
        if key in kwargs:
            raise UserError(f"register() takes no {key}: set RLlib's {instead}.")
    if not (isinstance(env, str) or callable(env)):
        raise UserError(
            f"register() takes a Gymnasium id, 'module:Class', a factory or a URL, not {type(env).__name__}."
        )
    try:
        registry: Any = importlib.import_module("ray.tune.registry")
        importlib.import_module("ray.rllib")
    except ImportError as error:
        raise UserError(f"RLlib cannot be imported ({error}): pip install 'corral-rl[rllib]'.") from error
    backend = {} if is_url(env) else {"backend": "local"}
    registry.register_env(name, partial(_create, env, backend | kwargs))


def _create(env: EnvLike, kwargs: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """The environments of one runner: a vector environment if RLlib gives their number, else a single one."""
    own = {key: value for key, value in config.items() if key != "num_envs"}
    kwargs = {**kwargs, "env_kwargs": {**(kwargs.get("env_kwargs") or {}), **own}}
    # Each runner gets a different seed; in a seeded run RLlib passes one to the first reset.
    seed = int(np.random.SeedSequence().generate_state(1)[0]) >> 1
    vec = make_vec(env, config.get("num_envs", 1), seed=seed, **kwargs)
    return HeldRows(vec) if "num_envs" in config else SingleEnv(vec)


class SingleEnv(gymnasium.Env[Any, Any]):
    """A VecEnv of one as a plain environment. Resetting after an episode returns the observation already received."""

    def __init__(self, vec: VecEnv):
        self.vec = vec
        self.observation_space, self.action_space = vec.spec.observation_space, vec.spec.action_space
        self._seeds = ResetSeeds(vec.seed)
        self._waiting: Any = None
        self._id = np.zeros(1, np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tree, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or self._waiting is None:
            self.vec.reset(self._seeds.next(seed))
            self._waiting = self._row(self.vec.recv().obs)
        obs, self._waiting = self._waiting, None
        return obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        layout = self.vec.spec.action
        leaves = [np.asarray(leaf)[None] for leaf in layout.flatten(action)]
        self.vec.send(self._id, layout.unflatten(leaves))
        batch = self.vec.recv()
        terminated, truncated = bool(batch.terminated[0]), bool(batch.truncated[0])
        if terminated or truncated:
            self._waiting = self._row(batch.obs)
        infos = {name: getattr(batch, name)[0] for name in INFOS}
        return self._row(batch.next_obs), float(batch.reward[0]), terminated, truncated, infos

    def close(self) -> None:
        self.vec.close()

    def _row(self, obs: Tree) -> Any:
        layout = self.vec.spec.observation
        return layout.unflatten([leaf[0] for leaf in layout.flatten(obs)])
