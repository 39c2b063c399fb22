"""Vector environments of other libraries, built as their documentation shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from benchmarks.common.contestants import Lockstep, Pipelined, draw_actions, envpool_async
from corral.core.errors import UserError
from corral.core.machine import cores
from corral.envs.suites.atari import import_ale

EnvFactory = Callable[[], "gymnasium.Env[Any, Any]"]

PONG = "PongNoFrameskip-v4"


def gymnasium_sync(factories: Sequence[EnvFactory], choices: int) -> Lockstep:
    """Gymnasium's SyncVectorEnv."""
    env = gymnasium.vector.SyncVectorEnv(factories)
    env.reset(seed=0)
    return Lockstep(env.step, len(factories), draw_actions(choices, len(factories)), env.close)


def gymnasium_async(factories: Sequence[EnvFactory], choices: int) -> Lockstep:
    """Gymnasium's AsyncVectorEnv, one process per environment."""
    env = gymnasium.vector.AsyncVectorEnv(factories)
    env.reset(seed=0)
    actions = draw_actions(choices, len(factories))
    return Lockstep(env.step, len(factories), actions, lambda: env.close(terminate=True))


def sb3_dummy(factories: Sequence[EnvFactory], choices: int, stack: int = 1) -> Lockstep:
    """Stable-Baselines3's DummyVecEnv."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    return _sb3(DummyVecEnv(list(factories)), choices, stack)


def sb3_subproc(factories: Sequence[EnvFactory], choices: int, stack: int = 1) -> Lockstep:
    """Stable-Baselines3's SubprocVecEnv; forked, because importing torch in each process takes minutes."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return _sb3(SubprocVecEnv(list(factories), start_method="fork"), choices, stack)


def _sb3(vec: Any, choices: int, stack: int) -> Lockstep:
    from stable_baselines3.common.vec_env import VecFrameStack

    if stack > 1:
        vec = VecFrameStack(vec, stack)
    vec.reset()
    return Lockstep(vec.step, vec.num_envs, draw_actions(choices, vec.num_envs), vec.close)


def envpool_sync(task: str, num_envs: int, choices: int, **options: Any) -> Lockstep:
    """EnvPool with all environments in lockstep."""
    pool = _envpool(task, num_envs, num_envs, options)
    pool.reset()
    return Lockstep(pool.step, num_envs, draw_actions(choices, num_envs, "int32"), close=lambda: None)


def envpool_halves(task: str, num_envs: int, choices: int, **options: Any) -> Pipelined:
    """EnvPool with half of the environments per batch."""
    if num_envs < 2:
        raise UserError("EnvPool in halves needs at least 2 environments: use --num-envs 2 or more.")
    pool = _envpool(task, num_envs, num_envs // 2, options)
    return envpool_async(pool, num_envs, draw_actions(choices, num_envs, "int32"))


def ale_vector(num_envs: int, choices: int) -> Lockstep:
    """ALE's vector environment, with the settings of Corral's native backend."""
    import_ale()
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv(
        "pong",
        num_envs,
        num_threads=min(cores(), num_envs),
        autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP,
        life_loss_info=True,
        reward_clipping=False,
    )
    env.reset(seed=0)
    return Lockstep(env.step, num_envs, draw_actions(choices, num_envs), env.close)


def gymnasium_pong() -> gymnasium.Env[Any, Any]:
    """Pong with Gymnasium's Atari wrappers."""
    import_ale()
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    env: Any = gymnasium.make(PONG)
    return FrameStackObservation(AtariPreprocessing(env, terminal_on_life_loss=True), 4)


def sb3_pong() -> gymnasium.Env[Any, Any]:
    """Pong with Stable-Baselines3's Atari wrappers; its vector environment stacks the frames."""
    import_ale()
    from stable_baselines3.common.atari_wrappers import AtariWrapper

    return AtariWrapper(gymnasium.make(PONG))


def _envpool(task: str, num_envs: int, batch_size: int, options: dict[str, Any]) -> Any:
    import envpool

    return envpool.make(
        task,
        env_type="gymnasium",
        num_envs=num_envs,
        batch_size=batch_size,
        num_threads=min(cores(), num_envs),
        **options,
    )
