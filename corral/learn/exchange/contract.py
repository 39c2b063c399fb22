"""What a learner does with its gradients and weights besides using them."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

Verdict = Literal["apply", "skip", "stop"]


class Exchange(Protocol):
    """Called by the learner around the optimizer; those of all learners are called alike, and equally often."""

    over: bool
    """Whether the update under way is the last of somebody's batch, and so of everybody's."""

    def grads(self, grad: Tensor, rows: int, *, stop: bool = False, last: bool = False) -> Verdict:
        """Share a gradient, and put everybody's in its place.

        It is the mean over `rows` rows, or a sum if that is 0. apply: clip it and step; skip: somebody else has
        done that; stop: one of the learners wants no more updates from its batch, so nobody makes this one. `last`
        says that there will be no other from this learner's batch.
        """

    def params(self, weights: Tensor) -> None:
        """Share the weights after a step."""

    def share(self, values: Tensor) -> list[Tensor]:
        """Everybody's values, in the same order everywhere."""
