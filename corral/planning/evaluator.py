"""What judges the leaves of a search: a network, a function, a policy to act on with, or nothing at all."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from corral.acting.policy import Policy
from corral.core.errors import UserError
from corral.planning.action_set import ActionSet
from corral.planning.mcts.evaluation import Evaluate
from corral.planning.mcts.rollouts import RolloutEvaluation
from corral.snapshot.states import States


def make_evaluation(
    policy: Any, states: States, actions: ActionSet, rollout_steps: int, discount: float, rng: np.random.Generator
) -> Evaluate:
    """How leaves are judged by `policy`.

    A network with policy and value, or a policy that `corral.load_policy` has loaded; a `Policy`, which acts on for
    `rollout_steps`; None, which does so at random; or a function `logits, values = fn(observations)`.
    """
    model = getattr(policy, "model", policy)
    if hasattr(model, "policy_head"):
        from corral.planning.mcts.network import NetworkEvaluation

        return NetworkEvaluation(model, actions, rng)
    if policy is None or isinstance(policy, Policy):
        return RolloutEvaluation(states, actions, rollout_steps, discount, rng, policy)
    if model is not policy:
        raise UserError(
            f"A search asks a policy for probabilities and values, and {type(model).__name__} has none: take one that "
            "ppo, a2c, impala or alphazero have trained."
        )
    if callable(policy) and not inspect.isclass(policy):
        from corral.planning.mcts.network import FunctionEvaluation

        return FunctionEvaluation(policy, actions, rng)
    raise UserError(
        f"{policy!r} cannot judge states: pass what corral.load_policy gives, a function that returns (logits, values),"
        " a Policy to act on with, or None to act at random."
    )
