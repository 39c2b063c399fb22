"""Two MLPs of the same shape, for policy and value, computed together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from corral.nets.torsos import SQRT2, linear

_FUNCTIONS = {"tanh": torch.tanh, "relu": torch.relu}


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
        size = self._first_size
        later = zip(self.weights, self.biases, strict=True)
        return [(self.first.weight[:size].T, self.first.bias[:size]), *((w[0], b[0, 0]) for w, b in later)]
