"""Encoders: observations of any supported space to one feature vector."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.core.types import Array, Tree, tree_map
from corral.nets.config import NetConfig
from corral.nets.leaf_encoding import SMALLEST_IMAGE, LeafEncoding, choose_encoding, image_shape
from corral.nets.obs_norm import ObsNorm
from corral.nets.torsos import ImpalaCnn, NatureCnn

_SMALLEST = {"nature": NatureCnn.smallest, "impala": SMALLEST_IMAGE}
_MAX_ROWS = 2048  # images encoded at once without gradients: about a gigabyte of activations


class Encoder(nn.Module):
    """Images through a convolutional encoder, discrete values and codes as one-hot, the rest as numbers; concatenated.

    Numbers are optionally normalised here, and images scaled to [0, 1], so that a saved network takes raw observations.
    """

    def __init__(self, layout: Layout, config: NetConfig, *, hidden: bool = True):
        super().__init__()
        self._layout = layout
        self._encodings = [choose_encoding(leaf, config) for leaf in layout.leaves]
        images = [image_shape(encoding.leaf) for encoding in self._encodings if encoding.kind == "image"]
        if config.encoder in _SMALLEST and not images:
            least = _SMALLEST[config.encoder]
            raise UserError(
                f"encoder={config.encoder} needs images of at least {least} x {least}, got {layout.space}: use "
                "encoder=mlp."
            )
        convs = [_cnn(config.encoder, shape)(*shape, hidden=hidden) for shape in images]
        self.convs = nn.ModuleList(convs)
        norm_size = sum(encoding.size for encoding in self._encodings if encoding.kind == "normalized")
        self.norm = ObsNorm(norm_size) if norm_size else None
        self._bf16 = False
        self._plain = layout.single and self._encodings[0].kind == "numbers" and layout.leaves[0].dtype.kind == "f"
        self.vector_size = sum(encoding.size for encoding in self._encodings if encoding.kind != "image")
        self.out_size = self.vector_size + sum(conv.out_size for conv in convs)

    def describe(self) -> str:
        """How images, codes and bytes are encoded; empty if there are none."""
        shown = [one for one in self._encodings if one.kind in ("image", "codes", "scaled")]
        return "; ".join(one.text for one in shown)

    @property
    def has_images(self) -> bool:
        return bool(self.convs)

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """Size of the layer that follows the convolutions; it is missing with `hidden=False`."""
        return tuple({conv.hidden_size for conv in self.convs})  # type: ignore[misc]

    def precision_context(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if self._bf16 else nullcontext()

    def use_precision(self, precision: str) -> None:
        """Run the convolutions in `bf16` or `fp32`. Features are float32 either way.

        Heads and recurrent cores stay in float32: with 8 significant bits, neighbouring values of 20 would be equal.
        """
        self._bf16 = precision == "bf16"

    def forward(self, obs: Tree) -> Tensor:
        floats, others, images = [], [], []
        for encoding, value in zip(self._encodings, self._layout.flatten(obs), strict=True):
            if encoding.kind == "image":
                images.append(encoding.image(value))
            elif _is_first(encoding):
                floats.append(encoding.features(value))
            else:
                others.append(encoding.features(value))
        parts = []
        if floats:
            vector = floats[0] if len(floats) == 1 else torch.cat(floats, -1)
            parts.append(vector if self.norm is None else self.norm(vector))
        parts += others
        if images:
            with self.precision_context(images[0].device):
                parts += [conv(image).float() for conv, image in zip(self.convs, images, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def in_parts(self, obs: Tree) -> Tensor:
        """`forward`; without gradients in parts, so that the images of a long rollout fit into memory."""
        n = len(self._layout.flatten(obs)[0])
        if not self.has_images or torch.is_grad_enabled() or n <= _MAX_ROWS:
            features: Tensor = self(obs)
            return features
        parts = (slice(at, at + _MAX_ROWS) for at in range(0, n, _MAX_ROWS))
        return torch.cat([self(tree_map(lambda leaf, rows=rows: leaf[rows], obs)) for rows in parts])

    def in_numpy(self, obs: Tree) -> Array:
        """`forward` for arrays without images; a single float vector does not involve torch."""
        if self._plain and isinstance(obs, np.ndarray):
            return obs.reshape(len(obs), -1).astype(np.float32, copy=False)
        with torch.no_grad():
            features: Array = self(tree_map(torch.as_tensor, obs)).numpy()
        return features

    def moments(self, obs: Tree) -> Tensor:
        """Moments of a batch of observations [n, ...], for `norm.merge`."""
        rows = zip(self._encodings, self._layout.flatten(obs), strict=True)
        found = [encoding.features(value) for encoding, value in rows if encoding.kind == "normalized"]
        return ObsNorm.moments(torch.cat(found, -1))


def _is_first(encoding: LeafEncoding) -> bool:
    """Floats, and what is normalised with them, come first; the order is that of the first layer's weights."""
    return encoding.kind == "normalized" or (encoding.kind == "numbers" and encoding.leaf.dtype.kind == "f")


def _cnn(encoder: str, shape: tuple[int, int, int]) -> type[NatureCnn | ImpalaCnn]:
    small = encoder == "auto" and min(shape[1:]) < NatureCnn.smallest
    return ImpalaCnn if encoder == "impala" or small else NatureCnn
