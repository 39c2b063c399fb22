"""Environments: one contract (`VecEnv`), several backends, wrappers and suites."""

from corral.envs import suites
from corral.envs.adapters.old_gym import old_gym
from corral.envs.vec_env import VecEnv

__all__ = ["VecEnv", "old_gym", "suites"]
