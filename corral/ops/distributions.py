"""Distributions over the actions of any supported space, as functions of one flat tensor of parameters.

A network outputs parameters `[..., P]`: the logits of all discrete choices one after the other, then means and log
standard deviations of the continuous numbers. An action is `[..., D]` in the same order, with discrete choices as
integers. Learning uses these; `to_env` converts them to the environment's format. There are no distribution objects:
small networks are bound by the number of operations.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor

from corral.core.errors import UserError
from corral.core.spaces import Layout, Leaf
from corral.core.types import Array, Tree
from corral.ops import kernels

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class Actions:
    """The distribution of one action space: independent choices and Gaussians.

    Continuous numbers are sampled from an unbounded Gaussian, so that log-probabilities are exact; the environment gets
    them clipped to [-1, 1] and scaled to their bounds, or unchanged if there are none.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        self._choices: list[list[int]] = []  # per leaf, the number of values of each choice
        self._numbers: list[int] = []  # per leaf, the number of continuous numbers
        lows, highs = [], []
        for leaf in layout.leaves:
            self._choices.append(_sizes(leaf))
            continuous = isinstance(leaf.space, gs.Box)
            self._numbers.append(int(np.prod(leaf.shape)) if continuous else 0)
            if isinstance(leaf.space, gs.Box):
                lows.append(leaf.space.low.reshape(-1))
                highs.append(leaf.space.high.reshape(-1))
        self._starts = [_start(leaf) for leaf in layout.leaves]
        self.sizes = [size for sizes in self._choices for size in sizes]
        self._size_array = np.array(self.sizes, np.int64)
        self.num_logits, self.num_choices, self.num_numbers = sum(self.sizes), len(self.sizes), sum(self._numbers)
        self.param_size = self.num_logits + 2 * self.num_numbers
        self.action_size = self.num_choices + self.num_numbers
        if self.num_numbers:
            low, high = np.concatenate(lows).astype(np.float64), np.concatenate(highs).astype(np.float64)
            bounded = np.isfinite(low) & np.isfinite(high)
            self._center = np.where(bounded, (np.where(bounded, low, 0) + np.where(bounded, high, 0)) / 2, 0.0)
            self._half = np.where(bounded, (np.where(bounded, high, 2) - np.where(bounded, low, 0)) / 2, 1.0)
            self.bounded, self._low, self._high = bounded, low, high

    @property
    def discrete(self) -> bool:
        return self.num_numbers == 0

    def sample(self, params: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        """Sample actions `[n, D]`; returns them and their log-probabilities `[n]`. In NumPy: batches are small here.

        Choices use the exponential race: `argmax p_i / e_i` with `e_i ~ Exp(1)` is distributed as `p`.
        """
        n, at = len(params), self.num_logits
        action = np.empty((n, self.action_size), np.float32)
        log_prob = np.zeros(n, np.float32)
        if at:
            kernels.choose(params, self._size_array, rng.standard_exponential((n, at)), action, log_prob)
        if self.num_numbers:
            mean, log_std = np.split(params[:, at:], 2, -1)
            noise = rng.standard_normal(mean.shape, np.float32)
            action[:, self.num_choices :] = mean + np.exp(log_std) * noise
            noise = (action[:, self.num_choices :] - mean) * np.exp(-log_std)  # of the rounded action
            log_prob -= (0.5 * noise * noise + log_std + _HALF_LOG_2PI).sum(-1)
        return action, log_prob

    def mode(self, params: Array) -> Array:
        action = np.empty((len(params), self.action_size), np.float32)
        at = 0
        for k, size in enumerate(self.sizes):
            action[:, k] = params[:, at : at + size].argmax(-1)
            at += size
        action[:, self.num_choices :] = params[:, at : at + self.num_numbers]
        return action

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of actions, and the entropy of the distribution."""
        log_probs, entropies = [], []
        for k, logits in enumerate(self._logits(params)):
            log_p = torch.log_softmax(logits, -1)
            log_probs.append(log_p.gather(-1, action[..., k : k + 1].long()).squeeze(-1))
            entropies.append(-(log_p.exp() * log_p).sum(-1))
        if self.num_numbers:
            mean, log_std = params[..., self.num_logits :].chunk(2, -1)
            noise = (action[..., self.num_choices :] - mean) * torch.exp(-log_std)
            log_probs.append(-(0.5 * noise * noise + log_std + _HALF_LOG_2PI).sum(-1))
            entropies.append((log_std + (0.5 + _HALF_LOG_2PI)).sum(-1))
        return reduce(operator.add, log_probs), reduce(operator.add, entropies)

    def evaluate_numpy(self, params: Array, action: Array) -> tuple[Array, Array, Callable[[Array, float], Array]]:
        """`evaluate` in NumPy for rows `[n]`, and a function from the gradients of both to that of the parameters.

        With `p = softmax(logits)`: `d logp_a = onehot(a) - p`, and `d H = -p (log p + H)`. With `e = (a - mean) / std`:
        `d logp = e / std` for the mean and `e^2 - 1` for the log deviation, whose entropy has gradient 1. The gradient
        of the entropy is the same for all rows.
        """
        n = len(params)
        rows, at = np.arange(n), 0
        log_prob: Array = np.zeros(n, np.float32)
        entropy: Array = np.zeros(n, np.float32)
        choices: list[tuple[slice, Array, Array, Array, Array]] = []
        for k, size in enumerate(self.sizes):
            part = slice(at, at + size)
            log_p, chosen = _log_softmax(params[:, part]), action[:, k].astype(np.int64)
            p = np.exp(log_p)
            part_entropy = -(p * log_p).sum(-1)
            log_prob, entropy = log_prob + log_p[rows, chosen], entropy + part_entropy
            choices.append((part, chosen, p, log_p, part_entropy))
            at += size
        if self.num_numbers:
            mean, log_std = np.split(params[:, at:], 2, -1)
            scale = np.exp(-log_std)
            noise = (action[:, self.num_choices :] - mean) * scale
            log_prob = log_prob - (0.5 * noise * noise + log_std + _HALF_LOG_2PI).sum(-1)
            entropy = entropy + (log_std + (0.5 + _HALF_LOG_2PI)).sum(-1)

        def backward(grad_logp: Array, grad_entropy: float) -> Array:
            grad = np.empty_like(params)
            column = grad_logp[:, None]
            for part, chosen, p, log_p, part_entropy in choices:
                grad[:, part] = -p * (column + grad_entropy * (log_p + part_entropy[:, None]))
                grad[rows, part.start + chosen] += grad_logp
            if self.num_numbers:
                grad[:, at : at + self.num_numbers] = column * noise * scale
                grad[:, at + self.num_numbers :] = column * (noise * noise - 1.0) + grad_entropy
            return grad

        return log_prob, entropy, backward

    def _logits(self, params: Tensor) -> list[Tensor]:
        if self.num_choices == 1 and not self.num_numbers:
            return [params]
        return list(torch.split(params[..., : self.num_logits], self.sizes, -1)) if self.sizes else []

    def to_env(self, action: Array) -> Tree:
        """Actions `[n, D]` in the format of the environment's space."""
        leaves, choice, number = [], 0, 0
        for leaf, sizes, numbers, start in zip(
            self.layout.leaves, self._choices, self._numbers, self._starts, strict=True
        ):
            if numbers:
                raw = action[:, self.num_choices + number : self.num_choices + number + numbers]
                leaves.append(self._bound(raw, slice(number, number + numbers)).reshape(-1, *leaf.shape))
                leaves[-1] = leaves[-1].astype(leaf.dtype)
                number += numbers
            else:
                values = action[:, choice : choice + len(sizes)].reshape(-1, *leaf.shape).astype(leaf.dtype)
                leaves.append(values if start is None else values + start)
                choice += len(sizes)
        return self.layout.unflatten(leaves)

    def _bound(self, raw: Array, part: slice) -> Array:
        bounded, low, high = self.bounded[part], self._low[part], self._high[part]
        scaled = self._center[part] + self._half[part] * np.clip(raw, -1.0, 1.0)
        bound: Array = np.clip(np.where(bounded, scaled, raw), low, high)
        return bound


def _log_softmax(logits: Array) -> Array:
    shifted: Array = logits - np.maximum.reduce(logits, axis=-1, keepdims=True)
    shifted -= np.log(np.add.reduce(np.exp(shifted), axis=-1, keepdims=True))
    return shifted


def _sizes(leaf: Leaf) -> list[int]:
    """The number of values of each discrete choice of a leaf."""
    space = leaf.space
    if isinstance(space, gs.Discrete):
        return [int(space.n)]
    if isinstance(space, gs.MultiDiscrete):
        return [int(n) for n in space.nvec.reshape(-1)]
    if isinstance(space, gs.MultiBinary):
        return [2] * int(np.prod(leaf.shape))
    if leaf.dtype.kind != "f":
        raise UserError(
            f"Action leaf '{leaf.name}' is a Box of integers ({leaf.dtype}); declare it as MultiDiscrete, or as a Box "
            "of float32 and round in the environment."
        )
    return []


def _start(leaf: Leaf) -> Array | None:
    """The first value of each choice, if it is not 0."""
    start = getattr(leaf.space, "start", None)
    if start is None or not np.any(start):
        return None
    return np.asarray(start, leaf.dtype)


_MAX = 4096


class JointChoices:
    """Several discrete choices as one: numbers 0..n-1 for all combinations, the last choice varying fastest."""

    def __init__(self, layout: Layout, name: str):
        for leaf in layout.leaves:
            if isinstance(leaf.space, gs.Box):
                raise UserError(
                    f"{name} needs discrete actions, and action leaf '{leaf.name}' is {leaf.space}; use ppo or a2c, "
                    "or make it discrete."
                )
        self._layout = layout
        self._sizes = [n for leaf in layout.leaves for n in _sizes(leaf)]
        self._starts = [0 if (start := _start(leaf)) is None else start for leaf in layout.leaves]
        self.count = math.prod(self._sizes)
        if self.count > _MAX:
            raise UserError(
                f"{name} needs at most {_MAX} combinations of actions, and {layout.space} has {self.count}; use ppo or "
                "a2c, or fewer choices."
            )

    def to_env(self, number: Array) -> Tree:
        parts = np.stack(np.unravel_index(number, self._sizes), -1)  # [n, choices]
        leaves, at = [], 0
        for leaf, start in zip(self._layout.leaves, self._starts, strict=True):
            width = int(np.prod(leaf.shape))
            leaves.append((parts[:, at : at + width].reshape(-1, *leaf.shape) + start).astype(leaf.dtype))
            at += width
        return self._layout.unflatten(leaves)

    def from_env(self, action: Tree) -> Array:
        values = zip(self._layout.flatten(action), self._starts, strict=True)
        joined = np.concatenate(
            [(value.astype(np.int64) - start).reshape(len(value), -1) for value, start in values], -1
        )
        number: Array = np.ravel_multi_index(tuple(joined.T), self._sizes)
        return number
