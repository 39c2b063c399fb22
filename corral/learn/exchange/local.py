"""One learner alone."""

from __future__ import annotations

from torch import Tensor

from corral.learn.exchange.base import Verdict


class Local:
    """Keeps gradients and weights to itself."""

    over = False  # it knows itself
    clips_first = False

    def agree(self, ready: bool) -> bool:
        """Whether it is ready."""
        return ready

    def grads(self, grad: Tensor, rows: int, lr: float, *, stop: bool = False, last: bool = False) -> Verdict:
        """Apply them."""
        return "stop" if stop else "apply"

    def params(self, weights: Tensor) -> None:
        """Keep them."""

    def share(self, values: Tensor) -> list[Tensor]:
        """Its own."""
        return [values]
