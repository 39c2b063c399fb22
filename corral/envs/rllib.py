"""RLlib on Corral's environments: anything `make_vec` takes, under a name that RLlib knows.

```python
corral.envs.rllib.register("my-env", "CartPole-v1")
config = PPOConfig().environment("my-env").env_runners(gym_env_vectorize_mode="vector_entry_point")
```

With that mode a runner's environments are one VecEnv. Without it RLlib puts them together itself, each a VecEnv of one,
which works the same and is slower.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from corral.core.errors import UserError
from corral.core.types import Array, Tree
from corral.envs.as_gymnasium import ResetSeeds
from corral.envs.make import make_vec
from corral.envs.resolve import EnvLike
from corral.envs.vec_env import VecEnv

_INFOS = ("raw_reward", "game_over", "faulty")


def register(name: str, env: EnvLike, **kwargs: Any) -> None:
    """Let RLlib's `config.environment(name)` train on this environment.

    Args:
        name: for RLlib.
        env: a Gymnasium id, `module:Class`, a factory or a suite, as for `corral.make_vec`.
        kwargs: further arguments of `make_vec`. The backend is `local` unless given: RLlib's runners are processes
            already. How many environments, and their seed, is RLlib's to say (`num_envs_per_env_runner`,
            `config.debugging(seed=...)`); what RLlib's `env_config` holds goes to the environment.
    """
    for key, instead in (("seed", "config.debugging(seed=...)"), ("num_envs", "num_envs_per_env_runner")):
        if key in kwargs:
            raise UserError(f"register() takes no {key}: set RLlib's {instead}.")
    if not (isinstance(env, str) or callable(env)):
        raise UserError(f"register() takes a Gymnasium id, 'module:Class' or a factory, not {type(env).__name__}.")
    try:
        registry: Any = importlib.import_module("ray.tune.registry")
        importlib.import_module("ray.rllib")
    except ImportError as error:
        raise UserError(f"RLlib cannot be imported ({error}): pip install 'corral-rl[rllib]'.") from error
    registry.register_env(name, _Creator(env, {"backend": "local", **kwargs}))


class _Creator:
    """Makes the environments of one runner: a vector environment if RLlib says how many, or else a single one."""

    def __init__(self, env: EnvLike, kwargs: Mapping[str, Any]):
        self._env, self._kwargs = env, kwargs

    def __call__(self, config: Mapping[str, Any]) -> Any:
        own = {key: value for key, value in config.items() if key != "num_envs"}
        kwargs = {**self._kwargs, "env_kwargs": {**(self._kwargs.get("env_kwargs") or {}), **own}}
        # Each runner gets another seed; a seeded run says its own at the first reset.
        seed = int(np.random.SeedSequence().generate_state(1)[0]) >> 1
        vec = make_vec(self._env, config.get("num_envs", 1), seed=seed, **kwargs)
        return NextStepVector(vec) if "num_envs" in config else SingleEnv(vec)


class NextStepVector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A VecEnv in Gymnasium's next-step autoreset mode, which RLlib's runners expect.

    A step brings the true last observation of an episode; the next step of that environment ignores its action and
    brings the first observation of the next episode, which has been waiting. `infos` has `raw_reward`, `game_over` and
    `faulty` of each step (see `as_gymnasium`).
    """

    def __init__(self, vec: VecEnv):
        self.vec, self.num_envs = vec, vec.num_envs
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = vec.spec.observation_space
        self.single_action_space = vec.spec.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._seeds = ResetSeeds(vec.seed)
        self._ended = np.zeros(self.num_envs, np.bool_)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tree, dict[str, Any]]:
        """Start new episodes everywhere."""
        chosen = self._seeds.next(seed)
        super().reset(seed=chosen)
        self.vec.reset(chosen)
        batch = self.vec.recv()
        self._ended[:] = False
        self._waiting = self.vec.spec.observation.flatten(batch.obs)
        return batch.obs, {}

    def step(self, actions: Tree) -> tuple[Tree, Array, Array, Array, dict[str, Any]]:
        """Step those whose episode goes on; the others show the first observation of their next one."""
        layout = self.vec.spec.observation
        shown = [leaf.copy() for leaf in self._waiting]
        reward = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), np.bool_)
        infos: dict[str, Any] = {name: np.zeros(self.num_envs, np.bool_) for name in _INFOS}
        infos["raw_reward"] = np.zeros(self.num_envs)
        due = np.flatnonzero(~self._ended)
        if len(due):
            rows = self.vec.spec.action.batch(actions, self.num_envs)
            self.vec.send(due, self.vec.spec.action.unflatten([leaf[due] for leaf in rows]))
            batch = self.vec.recv(env_ids=due)
            for out, leaf in zip(shown, layout.flatten(batch.next_obs), strict=True):
                out[due] = leaf
            for out, leaf in zip(self._waiting, layout.flatten(batch.obs), strict=True):
                out[due] = leaf
            reward[due], terminated[due], truncated[due] = batch.reward, batch.terminated, batch.truncated
            for name in _INFOS:
                infos[name][due] = getattr(batch, name)
        self._ended = terminated | truncated
        infos |= {f"_{name}": np.ones(self.num_envs, np.bool_) for name in _INFOS}
        return layout.unflatten(shown), reward, terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        """Close the VecEnv."""
        self.vec.close()


class SingleEnv(gymnasium.Env[Any, Any]):
    """A VecEnv of one as a plain environment. A reset at the end of an episode brings what has been waiting."""

    def __init__(self, vec: VecEnv):
        self.vec = vec
        self.observation_space, self.action_space = vec.spec.observation_space, vec.spec.action_space
        self._seeds = ResetSeeds(vec.seed)
        self._waiting: Any = None
        self._id = np.zeros(1, np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tree, dict[str, Any]]:
        """First observation of an episode."""
        super().reset(seed=seed)
        if seed is not None or self._waiting is None:
            self.vec.reset(self._seeds.next(seed))
            self._waiting = self._row(self.vec.recv().obs)
        obs, self._waiting = self._waiting, None
        return obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step."""
        layout = self.vec.spec.action
        leaves = [np.asarray(leaf)[None] for leaf in layout.flatten(action)]
        self.vec.send(self._id, layout.unflatten(leaves))
        batch = self.vec.recv()
        terminated, truncated = bool(batch.terminated[0]), bool(batch.truncated[0])
        if terminated or truncated:
            self._waiting = self._row(batch.obs)
        infos = {name: getattr(batch, name)[0] for name in _INFOS}
        return self._row(batch.next_obs), float(batch.reward[0]), terminated, truncated, infos

    def close(self) -> None:
        """Close the VecEnv."""
        self.vec.close()

    def _row(self, obs: Tree) -> Any:
        layout = self.vec.spec.observation
        return layout.unflatten([leaf[0] for leaf in layout.flatten(obs)])
