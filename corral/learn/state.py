"""A learner's state on its way: arrays in place of tensors, and the mean of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from corral.core.encoding import Value


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
