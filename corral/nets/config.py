"""Settings of a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from corral.core.errors import UserError


@dataclass(frozen=True)
class NetConfig:
    """Architecture of a network: encoder, optional recurrent core, heads."""

    encoder: Literal["auto", "mlp", "nature", "impala"] = "auto"
    """Encoder of observations; auto: nature for images (impala if smaller than 36 x 36), mlp for everything else."""
    obs_encoding: Literal["auto", "scaled", "raw", "bytes"] = "auto"
    """How bytes and other integers enter the network; auto: images and vectors scaled by their bounds, the codes of
    small grids one-hot; scaled: grids scaled too; raw: all but images as numbers; bytes: as in earlier versions, bytes
    divided by 255, and no convolutions for float images."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Layers of an mlp."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of an mlp."""
    rnn: Literal["none", "lstm", "gru"] = "none"
    """Recurrent core between the encoder and the heads."""
    rnn_size: int = 128
    """Hidden units of the recurrent core."""
    normalize_obs: bool = False
    """Normalize observations other than images by their running mean and deviation, which are part of the network."""
    log_std_init: float = 0.0
    """Initial log standard deviation of continuous actions."""

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.hidden_sizes):
            raise UserError(f"hidden_sizes must be at least 1 each, got {list(self.hidden_sizes)}.")
        if self.rnn_size < 1:
            raise UserError(f"rnn_size must be at least 1, got {self.rnn_size}.")
