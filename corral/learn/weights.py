"""All of a network's weights, and all of their gradients, each as one tensor.

Norms, optimizer steps, reductions and broadcasts are then one operation instead of one per weight, which is what
small networks spend their time on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corral.core.encoding import Value

_ALIGN = 16  # numbers, so that every weight begins on a cache line


class FlatParams:
    """Moves a network's weights into one tensor, `weights`, whose gradient is `weights.grad`.

    The network works as before: its weights are views, with their strides kept. Moving it to another device
    afterwards would break them apart.
    """

    def __init__(self, model: nn.Module):
        params = [p for p in model.parameters() if p.requires_grad]
        sizes = [-(-p.numel() // _ALIGN) * _ALIGN for p in params]
        data = torch.zeros(sum(sizes), dtype=params[0].dtype, device=params[0].device)
        self.weights = nn.Parameter(data)
        self.weights.grad = torch.zeros_like(data)
        at = 0
        for param, size in zip(params, sizes, strict=True):
            weight = _view(data, at, param)
            weight.copy_(param.data)
            param.data = weight
            param.grad = _view(self.weights.grad, at, param)
            at += size

    @property
    def grad(self) -> Tensor:
        """All gradients."""
        assert self.weights.grad is not None
        return self.weights.grad


def _view(flat: Tensor, at: int, like: Tensor) -> Tensor:
    """Part of a flat tensor, in the shape and memory order of a weight."""
    part = flat[at : at + like.numel()]
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous():
        o, i, h, w = like.shape
        return part.view(o, h, w, i).permute(0, 3, 1, 2)
    return part.view(like.shape)


# A learner's state on its way: arrays in place of tensors, and the mean of several.


def to_arrays(state: Any) -> Value:
    """The state with arrays in place of tensors."""
    if isinstance(state, dict):
        return {key: to_arrays(value) for key, value in state.items()}
    return state.detach().cpu().numpy().copy() if isinstance(state, torch.Tensor) else state


def to_tensors(state: Value) -> Any:
    """What `to_arrays` was given."""
    if isinstance(state, dict):
        return {key: to_tensors(value) for key, value in state.items()}
    return torch.from_numpy(np.array(state)) if isinstance(state, np.ndarray) else state


def mean_state(states: Sequence[Value]) -> Value:
    """The mean of what is real numbers; of counters the highest, of anything else the first."""
    first = states[0]
    if isinstance(first, dict):  # an optimizer has nothing to tell before its first step
        most = max(states, key=len)
        alike = [state for state in states if state.keys() == most.keys()]
        return {key: mean_state([state[key] for state in alike]) for key in most}
    if isinstance(first, np.ndarray) and first.dtype.kind == "f":
        return np.asarray(np.mean(states, axis=0, dtype=np.float64), first.dtype)
    if isinstance(first, int | float) and not isinstance(first, bool):
        return max(states)
    return first
