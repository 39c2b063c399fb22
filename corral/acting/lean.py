"""Small networks in NumPy, for acting: a handful of rows costs torch several times as much in overhead as in work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn

from corral.types import Array

_FUNCTIONS: dict[str, Callable[..., Array]] = {"tanh": np.tanh, "relu": lambda x, out: np.maximum(x, 0.0, out=out)}


class LeanActor:
    """The forward pass of an MLP on the weights' own memory, so that it is always the learner's latest.

    Only networks of plain layers on one vector of floats, in float32 on the CPU, have one.
    """

    def __init__(self, layers: list[tuple[Array, Array]], activation: str, norm: Any, tail: Array | None):
        self._layers, self._function, self._norm, self._tail = layers, _FUNCTIONS[activation], norm, tail

    @staticmethod
    def of(model: nn.Module) -> LeanActor | None:
        """The lean form of a network, None where it has none."""
        parts = getattr(model, "plain_layers", lambda: None)()
        if parts is None or next(model.parameters()).device.type != "cpu":
            return None
        layers, activation, norm, tail = parts
        arrays = [(_array(weight), _array(bias)) for weight, bias in layers]
        return LeanActor(arrays, activation, norm, None if tail is None else _array(tail))

    def __call__(self, obs: Array) -> Array:
        """Rows of observations to the network's outputs."""
        x = obs.reshape(len(obs), -1)
        if x.dtype != np.float32:
            x = x.astype(np.float32)
        if self._norm is not None:
            mean, scale, clip = self._norm()
            x = np.clip((x - mean) * scale, -clip, clip)
        *hidden, (last_weight, last_bias) = self._layers
        for weight, bias in hidden:
            x = x @ weight
            x += bias
            self._function(x, out=x)
        x = x @ last_weight
        x += last_bias
        return (
            x if self._tail is None else np.concatenate([x, np.broadcast_to(self._tail, (len(x), len(self._tail)))], 1)
        )


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().numpy()
    return array
