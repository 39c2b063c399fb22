"""Shared by the networks: numeric precision, and NumPy instead of torch for small ones."""

from __future__ import annotations

from torch import nn


class Network(nn.Module):
    """A network that runs in NumPy if it consists of small, plain layers on the CPU."""

    _learns_in_numpy = False

    def use_numpy(self) -> bool:
        """Act and evaluate in NumPy from now on; False if a layer is unsupported or a subclass overrides `forward`.

        Call it when the weights and their gradients have their final place in memory.
        """
        return False

    def learn_in_numpy(self) -> None:
        """Also run forward and backward passes of losses in NumPy, if `use_numpy` succeeded."""
        self._learns_in_numpy = True


def use_precision(model: nn.Module, precision: str) -> None:
    """Run a network in `bf16` by autocast, or in `fp32`; small ones then run in NumPy."""
    model.autocast = precision == "bf16"  # type: ignore[assignment]
    if precision == "fp32" and isinstance(model, Network):
        model.use_numpy()
