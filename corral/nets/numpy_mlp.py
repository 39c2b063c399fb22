"""Small networks in NumPy: on a few hundred rows, torch spends several times more on overhead than on work.

Weights and gradients share torch's memory, so the optimizer, checkpoints and everything else see no difference. Forward
and backward passes are tested against autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corral.core.types import Array
from corral.ops import kernels

_SMALL = 40_000  # weights; for larger networks BLAS is faster than one compiled call
_ACTIVATIONS = {nn.Tanh: "tanh", nn.ReLU: "relu"}


class NumpyMlp:
    """Plain layers with activations between them, in float32 on the CPU.

    Created when the weights have their final place in memory; `backward` adds to their current gradients.
    """

    def __init__(self, layers: Sequence[nn.Linear], activation: str):
        self._tanh = activation == "tanh"
        self._activate = kernels.add_bias_tanh if self._tanh else kernels.add_bias_relu
        self._small = sum(layer.weight.numel() for layer in layers) <= _SMALL
        self._anchor = layers[-1].weight
        self._weights = [layer.weight.detach().numpy() for layer in layers]  # [outputs, inputs]
        biases = [layer.bias.detach().numpy() for layer in layers]
        self._layers = tuple(zip(self._weights, biases, strict=True))
        self._grads = [  # of all layers, or of none: a target network, or a copy that acts
            (layer.weight.grad.numpy(), layer.bias.grad.numpy())
            for layer in layers
            if layer.weight.grad is not None and layer.bias.grad is not None
        ]

    def __call__(self, x: Array) -> Array:
        """The network's outputs for rows [n, inputs], for acting: each row is computed independently of the others."""
        if x.shape[1] != self._weights[0].shape[1]:  # compiled code does not check
            raise ValueError(f"A network of {self._weights[0].shape[1]} inputs got rows of {x.shape[1]}.")
        if self._small:
            outputs: Array = kernels.forward(np.ascontiguousarray(x), self._layers, self._tanh)
            return outputs
        return self.forward(x)[-1]

    def apply(self, x: Tensor) -> Tensor:
        """The network's outputs as part of torch's graph: `backward` of a loss adds to the weights' gradients."""
        outputs: Tensor = _Apply.apply(x, self._anchor, self)  # type: ignore[no-untyped-call]
        return outputs

    def forward(self, x: Array) -> list[Array]:
        """Outputs of every layer for rows [n, inputs], those of the network last."""
        outputs = []
        last = len(self._weights) - 1
        for k, (weight, bias) in enumerate(self._layers):
            x = x @ weight.T
            if k < last:
                self._activate(x, bias)
            else:
                x += bias
            outputs.append(x)
        return outputs

    def backward(self, x: Array, outputs: list[Array], grad: Array, *, need_input_grad: bool = False) -> Array | None:
        """Add the gradient of the weights, given that of the outputs; returns the gradient of `x` if requested."""
        for k in range(len(self._weights) - 1, -1, -1):
            before = outputs[k - 1] if k else x
            if self._grads:
                grad_weight, grad_bias = self._grads[k]
                grad_weight += grad.T @ before
                grad_bias += np.add.reduce(grad, 0)
            if k:
                grad = grad @ self._weights[k]
                if self._tanh:
                    kernels.times_tanh_slope(grad, before)
                else:
                    grad *= before > 0
        return grad @ self._weights[0] if need_input_grad else None


class _Apply(torch.autograd.Function):
    """A `NumpyMlp` in torch's graph. `anchor` is one of its weights, which ties the outputs to the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, mlp: NumpyMlp) -> Tensor:
        rows = x.detach().numpy()
        outputs = mlp.forward(rows)
        ctx.mlp, ctx.rows, ctx.outputs = mlp, rows, outputs
        return torch.from_numpy(outputs[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        grad_outputs = grads[0].contiguous().numpy()
        grad_rows = ctx.mlp.backward(ctx.rows, ctx.outputs, grad_outputs, need_input_grad=ctx.needs_input_grad[0])
        return None if grad_rows is None else torch.from_numpy(grad_rows), None, None


def make_numpy_mlp(torso: nn.Module, head: nn.Module, activation: str) -> NumpyMlp | None:
    """The layers of `torso` and `head` in NumPy; None if one is unsupported, has hooks, or is not on the CPU."""
    layers = [*torso, head] if isinstance(torso, nn.Sequential) else [torso, head]
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    between = [layer for layer in layers if type(layer) is not nn.Linear]
    alternate = layers[::2] == linears and all(_ACTIVATIONS.get(type(layer)) == activation for layer in between)
    plain = all(is_plain(layer, type(layer)) for layer in layers) and is_plain(torso, nn.Sequential)
    return NumpyMlp(linears, activation) if alternate and plain and _supported(linears) else None


def _supported(layers: Sequence[nn.Linear]) -> bool:
    """Whether the weights are parameters in float32 on the CPU without hooks, and all of them or none are trained."""
    params: list[Any] = [param for layer in layers for param in (layer.weight, layer.bias)]
    return (
        all(isinstance(param, nn.Parameter) and not param._backward_hooks for param in params)
        and all(param.device.type == "cpu" and param.dtype == torch.float32 for param in params)
        and len({(param.requires_grad, param.grad is not None) for param in params}) == 1
    )


def is_plain(module: nn.Module, kind: type[nn.Module], methods: Sequence[str] = ("forward",)) -> bool:
    """Whether `module` computes what the class `kind` defines: no method is overridden, and there are no hooks."""
    overridden = any(
        getattr(type(module), name, None) is not getattr(kind, name) or name in vars(module) for name in methods
    )
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not overridden and not any(hooks)
