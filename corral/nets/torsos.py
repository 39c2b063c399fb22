"""Torsos: MLPs for vectors, convolutional networks for images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from corral.core.errors import UserError

ACTIVATIONS: dict[str, Any] = {"tanh": nn.Tanh, "relu": nn.ReLU}
SQRT2 = math.sqrt(2.0)


def linear(inputs: int, outputs: int, gain: float = SQRT2) -> nn.Linear:
    """A layer with orthogonal weights and zero bias."""
    try:
        layer = nn.Linear(inputs, outputs)
    except RuntimeError as error:
        size = 4e-9 * inputs * outputs
        raise UserError(
            f"A layer of {inputs:,} x {outputs:,} weights takes {size:,.0f} GB: lower hidden_sizes."
        ) from error
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, hidden: Sequence[int], activation: str) -> nn.Sequential:
    """Layers with an activation after each."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [linear(inputs, size), ACTIVATIONS[activation]()]
        inputs = size
    return nn.Sequential(*layers)


class _Cnn(nn.Module):
    """Convolutions, with `hidden` followed by a layer of `hidden_size`."""

    hidden_size: int

    def __init__(self, channels: int, height: int, width: int, *, hidden: bool = True):
        super().__init__()
        self.convs = self._convs(channels, height, width)
        with torch.no_grad():
            flat = self.convs(torch.zeros(1, channels, height, width)).numel()
        self.out_size = self.hidden_size if hidden else flat
        layers = [linear(flat, self.hidden_size), nn.ReLU()] if hidden else []
        self.fc = nn.Sequential(nn.Flatten(), *layers)

    def _convs(self, channels: int, height: int, width: int) -> nn.Sequential:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.fc(self.convs(x))
        return features


class NatureCnn(_Cnn):
    """Three convolutions and a layer of 512 (Mnih et al. 2015), for images of at least 36 x 36."""

    hidden_size = 512
    smallest = 36

    def _convs(self, channels: int, height: int, width: int) -> nn.Sequential:
        if min(height, width) < self.smallest:
            least = f"{self.smallest} x {self.smallest}"
            raise UserError(
                f"encoder=nature needs images of at least {least}, got {height} x {width}: use encoder=impala."
            )
        return nn.Sequential(
            _conv(channels, 32, 8, 4), nn.ReLU(), _conv(32, 64, 4, 2), nn.ReLU(), _conv(64, 64, 3, 1), nn.ReLU()
        )


class ImpalaCnn(_Cnn):
    """Three stages of a convolution, a pooling and two residual blocks, and a layer of 256 (Espeholt et al. 2018)."""

    hidden_size = 256

    def _convs(self, channels: int, height: int, width: int) -> nn.Sequential:
        stages: list[nn.Module] = []
        for depth in (16, 32, 32):
            stages += [nn.Conv2d(channels, depth, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
            stages += [_Residual(depth), _Residual(depth)]
            channels = depth
        return nn.Sequential(*stages, nn.ReLU())


class _Residual(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.block = nn.Sequential(
            nn.ReLU(), nn.Conv2d(depth, depth, 3, padding=1), nn.ReLU(), nn.Conv2d(depth, depth, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.block(x)
        return out


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, kernel, stride)
    nn.init.orthogonal_(layer.weight, SQRT2)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
