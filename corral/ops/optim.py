"""Adam (Kingma and Ba 2015) and RMSProp (Hinton) for small networks, without the overhead of torch's.

Adam: `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2`, `w -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`.
RMSProp: `v = d v + (1 - d) g^2`, `w -= lr g / (sqrt(v) + eps)`. On a few thousand weights the arithmetic takes a tenth
of the time of `torch.optim.Adam.step`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from corral.ops import kernels

_BETA1, _BETA2 = 0.9, 0.999
_SMALL = 200_000  # weights; for more, torch's fused kernel, which passes over memory once, is faster


class Optimizer(Protocol):
    """The subset of `torch.optim.Optimizer` that a learner uses."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def adam(params: Iterable[Tensor], lr: float, eps: float = 1e-8) -> Optimizer:
    """Adam for these weights: torch's, or `SmallAdam` for one small tensor."""
    weights = list(params)
    if len(weights) == 1 and weights[0].numel() <= _SMALL and weights[0].device.type == "cpu":
        return SmallAdam(weights[0], lr, eps)
    return torch.optim.Adam(weights, lr, eps=eps, fused=True)


def adamw(params: Iterable[Tensor], lr: float, weight_decay: float) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
    return torch.optim.AdamW(list(params), lr, weight_decay=weight_decay, fused=True)


def rmsprop(params: Iterable[Tensor], lr: float, decay: float, eps: float) -> Optimizer:
    """RMSProp without momentum for these weights: torch's, or `SmallRmsprop` for one small tensor."""
    weights = list(params)
    if len(weights) == 1 and weights[0].numel() <= _SMALL and weights[0].device.type == "cpu":
        return SmallRmsprop(weights[0], lr, decay, eps)
    return torch.optim.RMSprop(weights, lr, alpha=decay, eps=eps)


class _SmallOptimizer:
    """An optimizer of one tensor, with a number of moments; its state uses torch's names."""

    def __init__(self, weights: Tensor, lr: float, eps: float, *moments: str):
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, "params": [weights]}]
        self._weights, self._eps, self._steps = weights, eps, 0
        self._moments = {name: torch.zeros_like(weights.data) for name in moments}

    def _next_grad(self) -> Tensor:
        assert self._weights.grad is not None
        self._steps += 1
        return self._weights.grad

    def state_dict(self) -> dict[str, Any]:
        state = {"step": self._steps, **self._moments}
        return {"state": {0: state}, "param_groups": [{"lr": self.param_groups[0]["lr"]}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = state_dict["state"].get(0)
        if state:
            self._steps = int(state["step"])
            for name, moment in self._moments.items():
                moment.copy_(state[name])


class SmallAdam(_SmallOptimizer):
    """Adam of one tensor."""

    def __init__(self, weights: Tensor, lr: float, eps: float):
        super().__init__(weights, lr, eps, "exp_avg", "exp_avg_sq")
        self._mean, self._square = self._moments.values()

    def step(self) -> None:
        grad = self._next_grad()
        kernels.adam(
            self._weights.detach().numpy(), grad.numpy(), self._mean.numpy(), self._square.numpy(),
            (_BETA1, _BETA2), self._steps, self.param_groups[0]["lr"], self._eps,
        )  # fmt: skip


class SmallRmsprop(_SmallOptimizer):
    """RMSProp of one tensor."""

    def __init__(self, weights: Tensor, lr: float, decay: float, eps: float):
        super().__init__(weights, lr, eps, "square_avg")
        self._decay, self._square = decay, self._moments["square_avg"]

    @torch.no_grad()
    def step(self) -> None:
        grad = self._next_grad()
        self._square.mul_(self._decay).addcmul_(grad, grad, value=1 - self._decay)
        self._weights.addcdiv_(grad, self._square.sqrt().add_(self._eps), value=-self.param_groups[0]["lr"])
