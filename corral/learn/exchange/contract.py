"""What a learner does with its gradients and weights besides using them."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor


class Exchange(Protocol):
    """Called by the learner around the optimizer."""

    def grads(self, grad: Tensor, samples: int) -> Literal["apply", "skip"]:
        """Share the gradient of `samples` samples; skip: somebody else has applied it."""

    def params(self, weights: Tensor) -> None:
        """Share the weights after a step."""
