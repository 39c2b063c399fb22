"""Small networks in NumPy: a few hundred rows cost torch several times as much in overhead as in work.

Weights and gradients are torch's own memory, so the optimizer, checkpoints and everything else see no difference.
Forward and backward passes are tested against autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from corral.types import Array


class LeanMlp:
    """Plain layers with an activation between them, in float32 on the CPU.

    Made when the weights have their final place in memory; `backward` adds to the gradients that they have then.
    """

    def __init__(self, layers: Sequence[nn.Linear], activation: str):
        self._tanh = activation == "tanh"
        self._weights = [layer.weight.detach().numpy() for layer in layers]  # [outputs, inputs]
        biases = [layer.bias.detach().numpy() for layer in layers]
        self._layers = [(weight.T, bias) for weight, bias in zip(self._weights, biases, strict=True)]
        self._grads = [
            (layer.weight.grad.numpy(), layer.bias.grad.numpy())
            for layer in layers
            if layer.weight.grad is not None and layer.bias.grad is not None
        ]

    def forward(self, x: Array) -> list[Array]:
        """Outputs of every layer for rows [n, inputs]; the last one's are the network's."""
        outputs = []
        last = len(self._weights) - 1
        with np.errstate(over="ignore"):
            for k, (transposed, bias) in enumerate(self._layers):
                x = x @ transposed
                x += bias
                if k < last:
                    x = _tanh(x) if self._tanh else np.maximum(x, 0.0, out=x)
                outputs.append(x)
        return outputs

    def backward(self, x: Array, outputs: list[Array], grad: Array) -> None:
        """Add the gradient of the weights, given the one of the network's outputs."""
        for k in range(len(self._weights) - 1, -1, -1):
            before = outputs[k - 1] if k else x
            of_weight, of_bias = self._grads[k]
            of_weight += grad.T @ before
            of_bias += grad.sum(0)
            if k:
                grad = grad @ self._weights[k]
                if self._tanh:  # d tanh = 1 - tanh^2
                    slope = before * before
                    np.subtract(1.0, slope, out=slope)
                    grad *= slope
                else:
                    grad *= before > 0


def _tanh(x: Array) -> Array:
    """`tanh(x) = 1 - 2 / (exp(2 x) + 1)`, in place; faster than NumPy's, to within 2e-7."""
    x *= 2.0
    np.exp(x, out=x)
    x += 1.0
    np.divide(-2.0, x, out=x)
    x += 1.0
    return x
