"""Who plays in an environment of a game: the agent for both sides, or against somebody."""

from __future__ import annotations

from corral.envs.backends.local import LocalVecEnv
from corral.envs.vec_env import VecEnv


def has_both_sides(vec: VecEnv) -> bool:
    """Whether an agent plays against itself there, so that its returns say only how often somebody wins."""
    return isinstance(vec, LocalVecEnv) and getattr(vec.environment(0).unwrapped, "answered", None) is False
