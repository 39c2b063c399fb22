"""From network scores to the best environment action, in torch: the counterpart of `Actions` in NumPy."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from corral.algos.base import Algorithm
from corral.algos.dqn import Dqn
from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.core.types import Array
from corral.nets.actor_critic import ActorCritic
from corral.ops.distributions import JointChoices


def make_head(algo: Algorithm, model: nn.Module) -> JointHead | SeparateHead:
    """A module that maps the scores `[n, P]` of an algorithm's network to the leaves of the best actions.

    Its `gap` is the largest difference between the scores of two actions' choices, relative to their scale.
    """
    if isinstance(model, ActorCritic):
        return SeparateHead(algo.spec.action)
    if isinstance(algo, Dqn):
        return JointHead(algo.choices, algo.spec.action)
    raise UserError(f"The policies of {type(algo).__name__} cannot be exported; use corral.load_policy.")


class JointHead(nn.Module):
    """One score per combination of choices."""

    def __init__(self, choices: JointChoices, layout: Layout):
        super().__init__()
        self._choices, self._layout = choices, layout
        leaves = layout.flatten(choices.to_env(np.arange(choices.count)))
        self.tables = nn.ParameterList(
            nn.Parameter(torch.from_numpy(leaf.astype(np.int64)), requires_grad=False) for leaf in leaves
        )

    def forward(self, scores: Tensor) -> list[Tensor]:
        best = scores.argmax(-1)
        return [table[best] for table in self.tables]

    def gap(self, scores: Array, some: list[Array], others: list[Array]) -> float:
        try:
            numbers = [self._choices.from_env(self._layout.unflatten(leaves)) for leaves in (some, others)]
        except ValueError:  # there is no such combination
            return float("inf")
        return _max_gap(scores, *numbers)


class SeparateHead(nn.Module):
    """Scores of each choice in turn, then continuous components, then unused ones."""

    def __init__(self, layout: Layout):
        super().__init__()
        parts = [_part(leaf.space) for leaf in layout.leaves]
        self.parts = nn.ModuleList(parts)
        self._slices: list[slice] = []
        starts = {_Choices: 0, _Numbers: sum(part.width for part in parts if isinstance(part, _Choices))}
        for part in parts:
            start = starts[type(part)]
            starts[type(part)] += part.width
            self._slices.append(slice(start, start + part.width))

    def forward(self, scores: Tensor) -> list[Tensor]:
        return [part(scores[:, at]) for part, at in zip(self.parts, self._slices, strict=True)]

    def gap(self, scores: Array, some: list[Array], others: list[Array]) -> float:
        found = [0.0]
        for part, at, left, right in zip(self.parts, self._slices, some, others, strict=False):
            if isinstance(part, _Choices):
                found += part.gaps(scores[:, at], left, right)
        return max(found)


class _Choices(nn.Module):
    """Discrete choices: the highest score of each, counted from its first value."""

    start: Tensor

    def __init__(self, sizes: list[int], start: Array, shape: tuple[int, ...]):
        super().__init__()
        self._sizes, self._shape, self.width = sizes, shape, sum(sizes)
        self.register_buffer("start", torch.from_numpy(start.astype(np.int64)))

    def forward(self, scores: Tensor) -> Tensor:
        best = [part.argmax(-1) for part in torch.split(scores, self._sizes, -1)]
        return torch.stack(best, -1).reshape(-1, *self._shape) + self.start

    def gaps(self, scores: Array, some: Array, others: Array) -> list[float]:
        left, right = ((leaf - self.start.numpy()).reshape(len(leaf), -1) for leaf in (some, others))
        parts = np.split(scores, np.cumsum(self._sizes)[:-1], -1)
        return [_max_gap(part, left[:, k], right[:, k]) for k, part in enumerate(parts)]


class _Numbers(nn.Module):
    """Continuous components: clipped to [-1, 1] and scaled to their bounds, unchanged if unbounded."""

    low: Tensor
    high: Tensor
    center: Tensor
    scale: Tensor
    bounded: Tensor

    def __init__(self, space: gs.Box):
        super().__init__()
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        bounded = np.isfinite(low) & np.isfinite(high)
        finite_low, finite_high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
        arrays = {"low": low, "high": high, "bounded": bounded}
        arrays |= {"center": (finite_low + finite_high) / 2, "scale": (finite_high - finite_low) / 2}
        for name, array in arrays.items():
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array)))
        self.width, self._shape = int(np.prod(space.shape)), space.shape
        self._dtype = getattr(torch, np.dtype(space.dtype).name)

    def forward(self, scores: Tensor) -> Tensor:
        raw = scores.double().reshape(-1, *self._shape)
        scaled = self.center + self.scale * raw.clamp(-1.0, 1.0)
        chosen = torch.where(self.bounded, scaled, raw)
        return torch.minimum(torch.maximum(chosen, self.low), self.high).to(self._dtype)


def _part(space: gs.Space[object]) -> _Choices | _Numbers:
    if isinstance(space, gs.Box):
        return _Numbers(space)
    if isinstance(space, gs.Discrete):
        return _Choices([int(space.n)], np.asarray(space.start), ())
    if isinstance(space, gs.MultiDiscrete):
        start = getattr(space, "start", np.zeros_like(space.nvec))
        return _Choices([int(n) for n in space.nvec.reshape(-1)], np.asarray(start), space.nvec.shape)
    assert isinstance(space, gs.MultiBinary)
    return _Choices([2] * int(np.prod(space.shape)), np.zeros((), np.int64), tuple(space.shape))


def _max_gap(scores: Array, some: Array, others: Array) -> float:
    """Largest difference between the scores of indexed choices."""
    numbers = np.stack([some, others])
    if numbers.min() < 0 or numbers.max() >= scores.shape[1]:
        return float("inf")
    left, right = scores[np.arange(len(scores)), numbers]
    return float((np.abs(left - right) / np.maximum(1.0, np.abs(scores).max(-1))).max())
