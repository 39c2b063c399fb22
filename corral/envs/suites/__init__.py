"""Ready-made environments: Atari as the literature plays it, and any environment seen through its pixels."""

from __future__ import annotations

from corral.envs.suites.atari import atari
from corral.envs.suites.pixels import pixels

__all__ = ["atari", "pixels"]
