"""Ready-made environments: the standard Atari stack, pixel observations of any environment, and board games."""

from corral.envs.suites.atari import atari
from corral.envs.suites.pixels import pixels

__all__ = ["atari", "pixels"]
