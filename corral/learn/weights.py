"""A network's weights as one flat tensor, and their gradients as another.

Norms, optimizer steps, reductions and broadcasts are then one operation instead of one per weight, which dominates the
cost of small networks. Each parameter group of the algorithm has a contiguous slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corral.algos.base import ParamGroup
from corral.core.encoding import Value

_ALIGN = 16  # numbers, so that every weight starts on a cache line


@dataclass(frozen=True)
class GroupSlice:
    """The slice of the flat weights that belongs to one parameter group."""

    where: slice
    weights: nn.Parameter
    """A view of the flat weights; its gradient is a view of the flat gradient."""
    params: Sequence[nn.Parameter]
    """The network's parameters in this slice."""

    @property
    def grad(self) -> Tensor:
        assert self.weights.grad is not None
        return self.weights.grad


class FlatParams:
    """Moves a network's weights into one tensor, `weights`, whose gradient is `weights.grad`.

    The network's parameters become views of it and keep their strides. Moving the network to another device
    afterwards would break this.
    """

    def __init__(self, model: nn.Module, groups: Sequence[ParamGroup]):
        members = split_params(model, groups)
        params = [param for group in members for param in group]
        data = torch.zeros(sum(map(_padded, params)), dtype=params[0].dtype, device=params[0].device)
        self.weights = nn.Parameter(data)
        self.weights.grad = torch.zeros_like(data)
        at = 0
        for param in params:
            weight = _view(data, at, param)
            weight.copy_(param.data)
            param.data = weight
            param.grad = _view(self.weights.grad, at, param)
            at += _padded(param)
        self.groups = [
            GroupSlice(where, self._part(where), group)
            for where, group in zip(group_slices(model, groups), members, strict=True)
        ]

    @property
    def grad(self) -> Tensor:
        assert self.weights.grad is not None
        return self.weights.grad

    def _part(self, where: slice) -> nn.Parameter:
        if where == slice(0, self.weights.numel()):  # the only group
            return self.weights
        part = nn.Parameter(self.weights.data[where])
        part.grad = self.grad[where]
        return part


def split_params(model: nn.Module, groups: Sequence[ParamGroup]) -> list[list[nn.Parameter]]:
    """The trainable parameters by group; each belongs to the group with the longest prefix of its name."""
    found: list[list[nn.Parameter]] = [[] for _ in groups]
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        fits = {k: len(p) for k, group in enumerate(groups) for p in group.prefixes if name.startswith(p)}
        if not fits:
            raise ValueError(f"The parameter {name} belongs to no group: give one of them a prefix of its name.")
        found[max(fits, key=lambda k: fits[k])].append(param)
    for group, params in zip(groups, found, strict=True):
        if not params:
            raise ValueError(f"The parameter group {group.name!r} is empty: no name begins with {group.prefixes}.")
    return found


def group_slices(model: nn.Module, groups: Sequence[ParamGroup]) -> list[slice]:
    """Each group's slice of the flat weights."""
    ends = np.cumsum([0, *(sum(map(_padded, params)) for params in split_params(model, groups))]).tolist()
    return [slice(start, stop) for start, stop in pairwise(ends)]


def _padded(param: Tensor) -> int:
    return -(-param.numel() // _ALIGN) * _ALIGN


def _view(flat: Tensor, at: int, like: Tensor) -> Tensor:
    """A slice of a flat tensor in the shape and memory order of a weight."""
    part = flat[at : at + like.numel()]
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous():
        o, i, h, w = like.shape
        return part.view(o, h, w, i).permute(0, 3, 1, 2)
    return part.view(like.shape)


def to_arrays(state: Any) -> Value:
    """A learner's state with arrays instead of tensors, for sending."""
    if isinstance(state, dict):
        return {key: to_arrays(value) for key, value in state.items()}
    return state.detach().cpu().numpy().copy() if isinstance(state, torch.Tensor) else state


def to_tensors(state: Value) -> Any:
    """Inverse of `to_arrays`."""
    if isinstance(state, dict):
        return {key: to_tensors(value) for key, value in state.items()}
    return torch.from_numpy(np.array(state)) if isinstance(state, np.ndarray) else state


def mean_state(states: Sequence[Value]) -> Value:
    """The mean of several learners' states: the mean of float arrays, the maximum of counters, else the first."""
    first = states[0]
    if isinstance(first, dict):  # an optimizer has no state before its first step
        most = max(states, key=len)
        alike = [state for state in states if state.keys() == most.keys()]
        return {key: mean_state([state[key] for state in alike]) for key in most}
    if isinstance(first, np.ndarray) and first.dtype.kind == "f":
        return np.asarray(np.mean(states, axis=0, dtype=np.float64), first.dtype)
    if isinstance(first, int | float) and not isinstance(first, bool):
        return max(states)
    return first
