"""A Corral VecEnv behind Stable-Baselines3's VecEnv interface."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces as gs

from corral.core.errors import UserError
from corral.core.types import Array, StepBatch, Tree
from corral.envs.adapters import env_calls
from corral.envs.adapters.as_gymnasium import ResetSeeds

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv as Sb3VecEnv

    from corral.envs.vec_env import VecEnv
else:
    Sb3VecEnv = object  # `_with_base` inserts the real base, so that this module imports without SB3


def make_sb3_vec_env(vec: VecEnv) -> Sb3VecEnv:
    """Wrap a VecEnv for Stable-Baselines3; UserError if SB3 is not installed."""
    return _with_base()(vec)


@functools.cache
def _with_base() -> type[AsSb3]:
    try:
        from stable_baselines3.common.vec_env import VecEnv as Base
    except ModuleNotFoundError as error:
        raise UserError("as_sb3() needs Stable-Baselines3: pip install 'corral-rl[sb3]'.") from error

    class Sb3Adapter(AsSb3, Base):
        __doc__ = AsSb3.__doc__

    return Sb3Adapter


class AsSb3(Sb3VecEnv):
    """All environments of a VecEnv, stepped together, with SB3's interface. `infos` are those of monitored
    environments: `TimeLimit.truncated` in every row, `terminal_observation` where an episode ended, and `episode` (`r`,
    `l`, `t`) where a game ended, with the unclipped rewards of all its lives; and the environments' own of
    `make_vec(info=...)`. A `faulty` row is a step that did not happen; its episode is truncated and not reported.
    """

    def __init__(self, vec: VecEnv):
        self.vec = vec
        self._seed_source = ResetSeeds(vec.seed)
        self._all_ids = np.arange(vec.num_envs)
        self._returns, self._lengths = np.zeros(vec.num_envs), np.zeros(vec.num_envs, np.int64)
        self._start_s = time.time()
        self._started = False
        super().__init__(vec.num_envs, vec.spec.observation_space, vec.spec.action_space)

    def reset(self) -> Tree:
        seed = self._seed_source.next()
        if any(self._options):
            options = [each or None for each in self._options]
            self._reset_options()
            self.vec.begin_episodes(np.arange(self.vec.num_envs), seed, options)
        else:
            self.vec.reset(seed)
        batch = self.vec.recv()
        self._started = True
        self._all_ids = batch.env_ids
        self._returns[:], self._lengths[:] = 0.0, 0
        self.reset_infos = batch.infos or [{} for _ in range(len(batch))]
        return batch.obs

    def step_async(self, actions: Any) -> None:
        if not self._started:
            raise UserError("Call reset() first: it returns the first observations.")
        if isinstance(self.vec.spec.action_space, gs.MultiBinary):
            actions = np.asarray(actions).astype(np.int8)  # SB3's Bernoulli policies give 0.0 and 1.0
        self.vec.send(self._all_ids, actions)

    def step_wait(self) -> tuple[Tree, Array, Array, list[dict[str, Any]]]:
        batch = self.vec.recv()
        done = batch.terminated | batch.truncated
        return batch.obs, batch.reward.astype(np.float32), done, self._infos(batch, done)

    def close(self) -> None:
        self.vec.close()

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """None draws a seed at random. The environments' seeds are not `seed + i`, so none are returned."""
        self._seed_source.plan(int(np.random.randint(2**31 - 1)) if seed is None else seed)
        return [None] * self.vec.num_envs

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Attributes of the environments; where the backend gives no access to them, those that all share."""
        ids = self._ids(indices)
        if self.vec.gives_access:
            return env_calls.get_attr(self.vec, attr_name, ids)
        shared: dict[str, Any] = {
            "render_mode": None,
            "observation_space": self.vec.spec.observation_space,
            "action_space": self.vec.spec.action_space,
        }
        if attr_name not in shared:
            # SB3's has_attr() expects AttributeError.
            raise AttributeError(
                f"{attr_name!r} is an attribute of the environments, which {type(self.vec).__name__} cannot read: use "
                "backend='local' or 'process'."
            )
        return [shared[attr_name]] * len(ids)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the outermost wrapper; it is lost when an environment fails and is rebuilt."""
        ids = self._ids(indices)
        env_calls.set_attr(self.vec, attr_name, [value] * len(ids), ids, outermost=True)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return env_calls.call(self.vec, method_name, args, kwargs, self._ids(indices))

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Whether the environments have that wrapper. The statistics of SB3's Monitor are in `infos` without one."""
        ids = self._ids(indices)
        return env_calls.is_wrapped(self.vec, wrapper_class, ids) if self.vec.gives_access else [False] * len(ids)

    def get_images(self) -> Sequence[Any]:
        if self.render_mode == "rgb_array":
            return env_calls.render(self.vec, self._ids(None))
        warnings.warn(
            f"The render mode is {self.render_mode}: pictures need make_vec(..., env_kwargs={{'render_mode': "
            "'rgb_array'}).",
            stacklevel=2,
        )
        return [None] * self.vec.num_envs

    def _ids(self, indices: Any) -> Array:
        chosen: Array = np.arange(self.vec.num_envs)[list(self._get_indices(indices))]
        return chosen

    def _infos(self, batch: StepBatch, done: Array) -> list[dict[str, Any]]:
        self._returns += batch.raw_reward
        self._lengths += 1
        infos = batch.infos or [{} for _ in range(len(batch))]
        for info in infos:
            info["TimeLimit.truncated"] = False
        if batch.final_obs is None:
            return infos
        layout = self.vec.spec.observation
        leaves = layout.flatten(batch.final_obs)
        elapsed_s = round(time.time() - self._start_s, 6)
        for row in np.flatnonzero(done).tolist():
            info = infos[row]
            self.reset_infos[row] = batch.first_infos[row] if batch.first_infos else {}
            info["TimeLimit.truncated"] = bool(batch.truncated[row] and not batch.terminated[row])
            info["terminal_observation"] = layout.unflatten([leaf[row].copy() for leaf in leaves])
            if batch.faulty[row]:
                info["faulty"] = True
            elif batch.game_over[row] and "episode" not in info:  # a Monitor's own, if it was asked for
                length = int(self._lengths[row])
                info["episode"] = {"r": round(float(self._returns[row]), 6), "l": length, "t": elapsed_s}
            if batch.faulty[row] or batch.game_over[row]:
                self._returns[row], self._lengths[row] = 0.0, 0
        return infos
