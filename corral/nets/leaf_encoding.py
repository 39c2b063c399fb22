"""How one leaf of an observation enters a network: as an image, one-hot, or as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from corral.core.spaces import Leaf
from corral.nets.config import NetConfig

SMALLEST_IMAGE = 16  # sides; below, convolutions for images have nothing to look at
_MAX_CHANNELS = 16
_CODES = 16  # values of an integer grid that are one-hot
_WIDE = 1e9  # a wider range stands for none, such as that of float32 itself: scaled by it, all values would be equal
_MAX_CELLS = 1024  # of a grid; a larger one would make the first layer of an MLP too wide


@dataclass(frozen=True)
class LeafEncoding:
    """The encoding of a leaf. Images and scaled numbers are brought from [low, low + span] to [0, 1]."""

    leaf: Leaf
    kind: Literal["image", "one-hot", "codes", "scaled", "numbers", "normalized"]
    low: float = 0.0
    span: float = 1.0

    @property
    def size(self) -> int:
        """Features per observation; not of images."""
        space, count = self.leaf.space, int(np.prod(self.leaf.shape))
        if isinstance(space, gs.Discrete):
            return int(space.n)
        if isinstance(space, gs.MultiDiscrete):
            return int(space.nvec.sum())
        return count * (self._codes + self._has_more) if self.kind == "codes" else count

    @property
    def text(self) -> str:
        """The encoding in a few words."""
        shape = "x".join(map(str, self.leaf.shape)) or "1"
        more = {
            "image": "convolutions",
            "codes": f"one-hot of {self._codes} values" + (" and scaled" if self._has_more else ""),
            "scaled": f"scaled from {self.low:g}..{self.low + self.span:g}",
        }
        return f"{self.leaf.name} {shape} {self.leaf.dtype.name}: {more.get(self.kind, self.kind)}"

    def image(self, value: Tensor) -> Tensor:
        """A batch of images as [n, channels, height, width] in [0, 1]."""
        return self._scaled(_channels_first(value, self.leaf.shape))

    def features(self, value: Tensor) -> Tensor:
        """A batch of values as features [n, size]."""
        n, space = value.shape[0], self.leaf.space
        if self.kind in ("numbers", "normalized"):
            return value.reshape(n, -1).float()
        if self.kind == "scaled":
            return self._scaled(value.reshape(n, -1))
        if self.kind == "codes":
            return self._one_hot_codes(value.reshape(n, -1))
        if isinstance(space, gs.Discrete):
            return nn.functional.one_hot(value.long() - int(space.start), int(space.n)).float()
        assert isinstance(space, gs.MultiDiscrete)
        starts = np.reshape(getattr(space, "start", np.zeros_like(space.nvec)), -1).tolist()
        sizes = space.nvec.reshape(-1).tolist()
        choices = zip(value.reshape(n, -1).long().unbind(-1), starts, sizes, strict=True)
        return torch.cat([nn.functional.one_hot(choice - start, size).float() for choice, start, size in choices], -1)

    @property
    def _codes(self) -> int:
        return min(_CODES, int(self.span) + 1)

    @property
    def _has_more(self) -> bool:
        return self.span >= _CODES

    def _scaled(self, value: Tensor) -> Tensor:
        value = value.float()
        return (value - self.low if self.low else value) / self.span

    def _one_hot_codes(self, value: Tensor) -> Tensor:
        """One-hot by value; where the bounds allow more values, the last place is for the rest, and the scaled number
        tells them apart.
        """
        codes = (value.long() - int(self.low)).clamp(max=self._codes - 1)
        found = (codes.unsqueeze(-1) == torch.arange(self._codes, device=codes.device)).flatten(1).float()
        return torch.cat([found, self._scaled(value)], -1) if self._has_more else found


def choose_encoding(leaf: Leaf, config: NetConfig) -> LeafEncoding:
    """The encoding of a leaf by its space and `obs_encoding`."""
    if not isinstance(leaf.space, gs.Box):
        binary = isinstance(leaf.space, gs.MultiBinary)
        return LeafEncoding(leaf, "numbers" if binary else "one-hot")
    how, integers, is_byte = config.obs_encoding, leaf.dtype.kind in "iu", leaf.dtype == np.uint8
    if how == "bytes":
        low, span = (0.0, 255.0) if is_byte else (0.0, 1.0)
        image = is_byte and config.encoder != "mlp" and _looks_like_image(leaf)
        normalized = config.normalize_obs and leaf.dtype.kind == "f"
        return LeafEncoding(leaf, "image" if image else _plain_kind(is_byte, normalized), low, span)
    low, high = (float(leaf.space.low.min()), float(leaf.space.high.max())) if leaf.space.low.size else (0.0, 0.0)
    bounded = bool(np.isfinite([low, high]).all()) and 0 < high - low < _WIDE
    if bounded and config.encoder != "mlp" and (is_byte or leaf.dtype.kind == "f") and _looks_like_image(leaf):
        return LeafEncoding(leaf, "image", low, high - low)
    if config.normalize_obs and (integers or leaf.dtype.kind == "f"):
        return LeafEncoding(leaf, "normalized")
    few = high - low < _CODES or is_byte
    if how == "auto" and integers and bounded and few and high - low > 1 and _is_grid(leaf):
        return LeafEncoding(leaf, "codes", low, high - low)
    scaled = bounded and is_byte and how != "raw"
    return LeafEncoding(leaf, "scaled", low, high - low) if scaled else LeafEncoding(leaf, "numbers")


def _plain_kind(is_byte: bool, normalized: bool) -> Literal["scaled", "normalized", "numbers"]:
    return "scaled" if is_byte else "normalized" if normalized else "numbers"


def _is_grid(leaf: Leaf) -> bool:
    return len(leaf.shape) in (2, 3) and int(np.prod(leaf.shape)) <= _MAX_CELLS


def _looks_like_image(leaf: Leaf) -> bool:
    """Whether a leaf has two large dimensions and few channels; matrices of floats are not images."""
    shape = leaf.shape
    if len(shape) == 2:
        return leaf.dtype == np.uint8 and min(shape) >= SMALLEST_IMAGE
    if len(shape) not in (3, 4) or _channel_axis(shape) is None:
        return False
    return min(image_shape(leaf)[1:]) >= SMALLEST_IMAGE


def _channel_axis(shape: tuple[int, ...]) -> int | None:
    """Axis of the channels of [c, h, w] or [h, w, c], or of a stack of colour frames [s, h, w, c]."""
    if len(shape) == 4:
        return 3 if shape[3] <= 4 and shape[0] <= _MAX_CHANNELS else None
    if shape[0] <= _MAX_CHANNELS and shape[0] <= shape[2]:
        return 0
    return 2 if shape[2] <= _MAX_CHANNELS else None


def image_shape(leaf: Leaf) -> tuple[int, int, int]:
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
