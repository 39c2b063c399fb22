"""Shared by the networks: precision of the encoder, and NumPy instead of torch for small networks."""

from __future__ import annotations

from torch import nn

from corral.nets.encoder import Encoder


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
    """Run a network's image encoder in `bf16` or `fp32`; networks without images then run in NumPy, if small."""
    if has_image_encoder(model):
        model.get_submodule("encoder").use_precision(precision)  # type: ignore[operator]
    elif isinstance(model, Network):
        model.use_numpy()


def describe_encoding(model: nn.Module) -> str:
    """How the network encodes images and integers; empty if it has neither."""
    encoder = getattr(model, "encoder", None)
    return encoder.describe() if isinstance(encoder, Encoder) else ""


def has_image_encoder(model: nn.Module) -> bool:
    """Whether the submodule `encoder` is an `Encoder` with images, the one part of a network that can run in bf16."""
    encoder = getattr(model, "encoder", None)
    return isinstance(encoder, Encoder) and encoder.has_images
