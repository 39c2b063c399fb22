"""Environments: one contract (`VecEnv`), several backends, wrappers and suites."""

from __future__ import annotations

from corral.envs import suites
from corral.envs.vec_env import VecEnv

__all__ = ["VecEnv", "suites"]
