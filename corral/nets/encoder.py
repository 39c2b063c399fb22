"""Encoders: observations of any supported space to one feature vector."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from corral.core.errors import UserError
from corral.core.spaces import Layout, Leaf
from corral.core.types import Array, Tree, tree_map
from corral.nets.config import NetConfig
from corral.nets.obs_norm import ObsNorm
from corral.nets.torsos import ImpalaCnn, NatureCnn

_MAX_CHANNELS = 16
_MAX_ROWS = 2048  # images encoded at once without gradients: about a gigabyte of activations


class Encoder(nn.Module):
    """Images through a convolutional encoder, discrete values as one-hot, the rest unchanged; concatenated.

    Float leaves are optionally normalised here, and images scaled to [0, 1], so that a saved network takes raw
    observations.
    """

    def __init__(self, layout: Layout, config: NetConfig, *, hidden: bool = True):
        super().__init__()
        self._layout = layout
        self._images = {leaf.name: _image_shape(leaf) for leaf in layout.leaves if is_image(leaf, config.encoder)}
        if config.encoder in ("nature", "impala") and not self._images:
            raise UserError(f"encoder={config.encoder} needs image observations, got {layout.space}: use encoder=mlp.")
        cnn = ImpalaCnn if config.encoder == "impala" else NatureCnn
        convs = [cnn(*shape, hidden=hidden) for shape in self._images.values()]
        self.convs = nn.ModuleList(convs)
        norm_size = sum(int(np.prod(leaf.shape)) for leaf in layout.leaves if self._is_float(leaf))
        self.norm = ObsNorm(norm_size) if config.normalize_obs and norm_size else None
        self._bf16 = False
        self._plain = layout.single and self._is_float(layout.leaves[0]) and self.norm is None
        self.vector_size = sum(_vector_size(leaf) for leaf in layout.leaves if leaf.name not in self._images)
        self.out_size = self.vector_size + sum(conv.out_size for conv in convs)

    @property
    def has_images(self) -> bool:
        return bool(self._images)

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
        for leaf, value in zip(self._layout.leaves, self._layout.flatten(obs), strict=True):
            if leaf.name in self._images:
                images.append(_channels_first(value, leaf.shape).float() / 255.0)
            elif self._is_float(leaf):
                floats.append(value.reshape(value.shape[0], -1).float())
            else:
                others.append(_encode(leaf, value))
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
        if not self._images or torch.is_grad_enabled() or n <= _MAX_ROWS:
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
        leaves = zip(self._layout.leaves, self._layout.flatten(obs), strict=True)
        floats = [value.reshape(value.shape[0], -1).float() for leaf, value in leaves if self._is_float(leaf)]
        return ObsNorm.moments(torch.cat(floats, -1))

    def _is_float(self, leaf: Leaf) -> bool:
        return leaf.dtype.kind == "f" and leaf.name not in self._images


def is_image(leaf: Leaf, encoder: str = "auto") -> bool:
    """Whether a leaf is encoded by convolutions: bytes with two large dimensions and few channels."""
    shape = leaf.shape
    return (
        encoder != "mlp"
        and leaf.dtype == np.uint8
        and (len(shape) == 2 or (len(shape) in (3, 4) and _channel_axis(shape) is not None))
        and _image_shape(leaf)[1] >= 16
        and _image_shape(leaf)[2] >= 16
    )


def _channel_axis(shape: tuple[int, ...]) -> int | None:
    """Axis of the channels of [c, h, w] or [h, w, c], or of a stack of colour frames [s, h, w, c]."""
    if len(shape) == 4:
        return 3 if shape[3] <= 4 and shape[0] <= _MAX_CHANNELS else None
    if shape[0] <= _MAX_CHANNELS and shape[0] <= shape[2]:
        return 0
    return 2 if shape[2] <= _MAX_CHANNELS else None


def _image_shape(leaf: Leaf) -> tuple[int, int, int]:
    """Channels, height and width."""
    shape = leaf.shape
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    if len(shape) == 4:
        return shape[0] * shape[3], shape[1], shape[2]
    return (shape[0], shape[1], shape[2]) if _channel_axis(shape) == 0 else (shape[2], shape[0], shape[1])


def _channels_first(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 2:
        return value.unsqueeze(1)
    if len(shape) == 4:
        return value.permute(0, 1, 4, 2, 3).flatten(1, 2)
    return value if _channel_axis(shape) == 0 else value.permute(0, 3, 1, 2)


def _vector_size(leaf: Leaf) -> int:
    space = leaf.space
    if isinstance(space, gs.Discrete):
        return int(space.n)
    if isinstance(space, gs.MultiDiscrete):
        return int(space.nvec.sum())
    return int(np.prod(leaf.shape))


def _encode(leaf: Leaf, value: Tensor) -> Tensor:
    """Discrete values as one-hot, other integers as numbers, bytes scaled to [0, 1]."""
    space, n = leaf.space, value.shape[0]
    if isinstance(space, gs.Discrete):
        return nn.functional.one_hot(value.long() - int(space.start), int(space.n)).float()
    if isinstance(space, gs.MultiDiscrete):
        starts = np.reshape(getattr(space, "start", np.zeros_like(space.nvec)), -1).tolist()
        choices = zip(value.reshape(n, -1).long().unbind(-1), starts, space.nvec.reshape(-1).tolist(), strict=True)
        return torch.cat([nn.functional.one_hot(choice - start, size).float() for choice, start, size in choices], -1)
    scale = 255.0 if leaf.dtype == np.uint8 and isinstance(space, gs.Box) else 1.0
    return value.reshape(n, -1).float() / scale
