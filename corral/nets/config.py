"""Settings of a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from corral.core.errors import UserError


@dataclass(frozen=True)
class NetConfig:
    """What a network looks like."""

    torso: Literal["auto", "mlp", "nature", "impala"] = "auto"
    """What sees the observations; auto: nature for images, mlp for everything else."""
    hidden: tuple[int, ...] = (64, 64)
    """Layers of an mlp."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Between the layers of an mlp."""
    core: Literal["none", "lstm", "gru"] = "none"
    """Memory between the torso and the heads."""
    core_size: int = 128
    """Numbers that the memory holds."""
    normalize_obs: bool = False
    """Scale float observations by their running mean and deviation; the statistics are part of the network."""
    log_std: float = 0.0
    """Of continuous actions, at the start."""

    def __post_init__(self) -> None:
        """Refuse sizes that no layer can have."""
        if any(size < 1 for size in self.hidden):
            raise UserError(f"hidden must be sizes of at least 1, got {list(self.hidden)}.")
        if self.core_size < 1:
            raise UserError(f"core_size must be at least 1, got {self.core_size}.")
