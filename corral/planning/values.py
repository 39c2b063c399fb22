"""What states are worth by their observations, whoever says it: a user's function, or a network's value function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from corral.acting.model_policy import acting_precision, to_tensors
from corral.acting.policy import to_numpy
from corral.core.errors import UserError
from corral.core.types import Array, Tree
from corral.nets.actor_critic import ActorCritic

Values = Callable[[Tree], Array]


def values_by(said: ActorCritic | Callable[[Tree], Tree]) -> Values:
    """Observations [B, ...] -> values [B]."""
    if isinstance(said, ActorCritic):
        if said.recurrent:
            raise UserError("A plan ends in states seen by themselves, and this value has a memory: use core=none.")
        return _OfNetwork(said)
    if not callable(said):
        raise UserError(f"{said!r} gives no values: pass a function of the observations, or a policy of Corral's.")
    return lambda obs: np.asarray(to_numpy(said(obs)), np.float64).reshape(-1)


class _OfNetwork:
    """A network's value function, as it is whenever it is asked."""

    def __init__(self, model: ActorCritic):
        self._model = model

    def __call__(self, obs: Tree) -> Array:
        if self._model.lean:
            _, values = self._model.lean_rows(obs)
        else:
            values = self._forward(obs)
        return values.astype(np.float64)

    def _forward(self, obs: Tree) -> Array:
        import torch

        device = self._model.value_head.weight.device
        with torch.inference_mode(), acting_precision(self._model, device):
            _, values = self._model(to_tensors(obs, device))
        rows: Array = values.float().cpu().numpy()
        return rows
