"""Evaluation by a network: priors or sampled actions from its policy, values from its value function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from corral.acting.model_policy import params_and_values
from corral.acting.policy import to_numpy
from corral.core.errors import RunFailed, UserError
from corral.core.types import Array, Tree
from corral.nets.actor_critic import ActorCritic
from corral.planning.action_set import ActionSet, Choices
from corral.planning.mcts.evaluation import LeafValues


class NetworkEvaluation:
    """A feed-forward actor-critic with its current weights."""

    def __init__(self, model: ActorCritic, actions: ActionSet, rng: np.random.Generator):
        if model.recurrent:
            raise UserError("A search evaluates single states, and this policy is recurrent: train one with rnn=none.")
        self._model, self._actions, self._rng = model, actions, rng

    def __call__(self, obs: Tree, legal: Array, ids: Array) -> LeafValues:
        params, values = params_and_values(self._model, obs)
        if not (np.isfinite(params).all() and np.isfinite(values).all()):
            raise RunFailed("The policy's outputs are no longer finite; train again with a lower learning_rate.")
        priors, drawn = self._actions.offer(params, legal, self._rng)
        return LeafValues(priors, values, drawn)


class FunctionEvaluation:
    """A user's function `logits, values = fn(obs)`, for actions that can be enumerated."""

    def __init__(self, fn: Callable[[Tree], tuple[Tree, Tree]], actions: ActionSet, rng: np.random.Generator):
        if not isinstance(actions, Choices):
            raise UserError(
                "A function that evaluates states returns one logit per action, and these actions cannot be "
                "enumerated: pass a policy trained by Corral, or None for random rollouts."
            )
        self._fn, self._actions, self._rng = fn, actions, rng

    def __call__(self, obs: Tree, legal: Array, ids: Array) -> LeafValues:
        answer = self._fn(obs)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise UserError(
                f"A function that evaluates states must return (logits, values), got {type(answer).__name__}."
            )
        logits, values = (np.asarray(to_numpy(part), np.float32) for part in answer)
        if logits.shape != (len(ids), self._actions.width) or values.size != len(ids):
            raise UserError(
                f"A function that evaluates states must return logits [{len(ids)}, {self._actions.width}] and values "
                f"[{len(ids)}], got {list(logits.shape)} and {list(values.shape)}."
            )
        if not ((logits < np.inf).all() and np.isfinite(values).all()):  # -inf: an action that is never taken
            raise UserError("A function that evaluates states returned NaN or infinity; only logits may be -inf.")
        priors, _ = self._actions.offer(logits, legal, self._rng)
        return LeafValues(priors, values.reshape(-1))
