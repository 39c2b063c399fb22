"""Two MLPs of the same shape, for policy and value, computed together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from corral.nets.torsos import SQRT2, linear

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu}


class TwinMlp(nn.Module):
    """Two towers in one batched product per layer: small networks are bound by the number of operations.

    The first layer is one matrix for both, because both see the same input.
    """

    def __init__(self, inputs: int, hidden: Sequence[int], activation: str):
        super().__init__()
        self.activation, self._function = activation, _FUNCTIONS[activation]
        self._first_size = hidden[0]
        self.first = nn.Linear(inputs, 2 * hidden[0])
        nn.init.zeros_(self.first.bias)
        with torch.no_grad():
            for tower in self.first.weight.chunk(2):
                tower.copy_(linear(inputs, hidden[0]).weight)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for size, after in itertools.pairwise(hidden):
            towers = [nn.init.orthogonal_(torch.empty(after, size), SQRT2).T for _ in range(2)]
            self.weights.append(nn.Parameter(torch.stack(towers)))
            self.biases.append(nn.Parameter(torch.zeros(2, 1, after)))
        self.out_size = hidden[-1]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n, inputs] to the features of the policy and of the value, [n, out_size] each."""
        if x.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_exporting():
            later = itertools.chain.from_iterable(zip(self.weights, self.biases, strict=True))
            policy, value = _Towers.apply(  # type: ignore[no-untyped-call]
                x, self.activation, self.first.weight, self.first.bias, *later
            )
            return policy, value
        both = self._function(self.first(x)).view(-1, 2, self._first_size).transpose(0, 1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            both = self._function(torch.baddbmm(bias, both, weight))
        return both[0], both[1]

    def policy(self, x: Tensor) -> Tensor:
        """The features of the policy alone, for acting."""
        for weight, bias in self.policy_layers():
            x = self._function(torch.addmm(bias, x, weight))
        return x

    def policy_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weights `[inputs, outputs]` and biases of the policy's tower, as views."""
        return self._tower(0)

    def _tower(self, which: int) -> list[tuple[Tensor, Tensor]]:
        part = slice(which * self._first_size, (which + 1) * self._first_size)
        later = zip(self.weights, self.biases, strict=True)
        return [(self.first.weight[part].T, self.first.bias[part]), *((w[which], b[which, 0]) for w, b in later)]


class _Towers(torch.autograd.Function):
    """The towers with their gradient written out: half the operations, and a tanh of twice the speed.

    `tanh(x) = 2 sigmoid(2 x) - 1`, which torch computes faster on a CPU, to within 2e-7.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, *params: Tensor) -> tuple[Tensor, Tensor]:
        tanh = activation == "tanh"
        scale = 2.0 if tanh else 1.0
        first_weight, first_bias, *later = params
        out = torch.addmm(first_bias, x, first_weight.T, beta=scale, alpha=scale)
        out = out.sigmoid_().mul_(2).sub_(1) if tanh else out.relu_()
        outputs = [out]
        both = out.view(len(x), 2, -1).transpose(0, 1)
        for weight, bias in zip(later[::2], later[1::2], strict=True):
            both = torch.baddbmm(bias, both, weight, beta=scale, alpha=scale)
            both = both.sigmoid_().mul_(2).sub_(1) if tanh else both.relu_()
            outputs.append(both)
        ctx.tanh = tanh
        ctx.save_for_backward(x, first_weight, *later[::2], *outputs)
        return both[0], both[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, first_weight, *rest = ctx.saved_tensors
        weights, outputs = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        through = torch.ops.aten.tanh_backward if ctx.tanh else _relu_backward
        grad = torch.stack(grads)
        found: list[Tensor] = []
        for k in range(len(weights) - 1, -1, -1):
            grad = through(grad, outputs[k + 1])
            before = outputs[k] if k else outputs[0].view(len(x), 2, -1).transpose(0, 1)
            found[:0] = [torch.bmm(before.transpose(1, 2), grad), grad.sum(1, keepdim=True)]
            grad = torch.bmm(grad, weights[k].transpose(1, 2))
        flat = through(grad.transpose(0, 1).reshape(len(x), -1), outputs[0])
        into = flat @ first_weight if ctx.needs_input_grad[0] else None
        return into, None, flat.T @ x, flat.sum(0), *found


def _relu_backward(grad: Tensor, output: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(grad, output, 0)  # type: ignore[no-any-return]
