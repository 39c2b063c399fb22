"""One learner alone."""

from __future__ import annotations

from typing import Literal

from torch import Tensor


class Local:
    """Keeps gradients and weights to itself."""

    def grads(self, grad: Tensor, samples: int) -> Literal["apply", "skip"]:
        """Apply them."""
        return "apply"

    def params(self, weights: Tensor) -> None:
        """Keep them."""
