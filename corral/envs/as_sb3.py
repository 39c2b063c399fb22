"""A Corral VecEnv behind Stable-Baselines3's VecEnv interface."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces as gs

from corral.core.errors import UserError
from corral.core.types import Array, StepBatch, Tree
from corral.envs.as_gymnasium import ResetSeeds

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
    `l`, `t`) where a game ended, with the unclipped rewards of all its lives. A `faulty` row is a step that did not
    happen; its episode is truncated and not reported.
    """

    def __init__(self, vec: VecEnv):
        self.vec = vec
        self._seed_source = ResetSeeds(vec.seed)
        self._all_ids = np.arange(vec.num_envs)
        self._returns, self._lengths = np.zeros(vec.num_envs), np.zeros(vec.num_envs, np.int64)
        self._start_s = time.time()
        super().__init__(vec.num_envs, vec.spec.observation_space, vec.spec.action_space)

    def reset(self) -> Tree:
        if any(self._options):
            self._reset_options()
            raise UserError(
                "set_options() cannot reach environments behind a VecEnv; pass env_kwargs to corral.make_vec instead."
            )
        self.vec.reset(self._seed_source.next())
        batch = self.vec.recv()
        self._all_ids = batch.env_ids
        self._returns[:], self._lengths[:] = 0.0, 0
        return batch.obs

    def step_async(self, actions: Array) -> None:
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
        """Attributes that all environments share; the others are not accessible across processes."""
        shared: dict[str, Any] = {
            "render_mode": None,
            "metadata": {"render_modes": []},
            "observation_space": self.vec.spec.observation_space,
            "action_space": self.vec.spec.action_space,
        }
        if attr_name not in shared:
            # SB3's has_attr() expects AttributeError.
            raise AttributeError(
                f"{attr_name!r} is an attribute of the environments, which as_sb3() cannot read; it provides "
                f"{', '.join(shared)}."
            )
        return [shared[attr_name] for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise UserError(
            f"as_sb3() cannot set {attr_name!r} inside the environments; pass it to corral.make_vec by env_kwargs."
        )

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise UserError(
            f"as_sb3() cannot call {method_name}() inside the environments; SB3's own DummyVecEnv can, for "
            "the few algorithms that need it (HER, action masks)."
        )

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """True for SB3's Monitor, whose statistics are provided here, and False for anything else."""
        from stable_baselines3.common.monitor import Monitor

        monitored = isinstance(wrapper_class, type) and issubclass(wrapper_class, Monitor)
        return [monitored for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[Any]:
        raise UserError("as_sb3() cannot render; for videos, make one environment with gymnasium.make.")

    def _infos(self, batch: StepBatch, done: Array) -> list[dict[str, Any]]:
        self._returns += batch.raw_reward
        self._lengths += 1
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(len(batch))]
        if batch.final_obs is None:
            return infos
        layout = self.vec.spec.observation
        leaves = layout.flatten(batch.final_obs)
        elapsed_s = round(time.time() - self._start_s, 6)
        for row in np.flatnonzero(done).tolist():
            info = infos[row]
            info["TimeLimit.truncated"] = bool(batch.truncated[row] and not batch.terminated[row])
            info["terminal_observation"] = layout.unflatten([leaf[row].copy() for leaf in leaves])
            if batch.faulty[row]:
                info["faulty"] = True
            elif batch.game_over[row]:
                length = int(self._lengths[row])
                info["episode"] = {"r": round(float(self._returns[row]), 6), "l": length, "t": elapsed_s}
            if batch.faulty[row] or batch.game_over[row]:
                self._returns[row], self._lengths[row] = 0.0, 0
        return infos
