"""Losses of small networks with their gradients written out, in NumPy.

The same losses as the algorithms state in torch, and tested to be equal to them; on a few hundred rows of an MLP
they take a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from corral.algos.rollout import Rows
from corral.nets.actor_critic import ActorCritic
from corral.types import Array, LossOutput

PolicyTerm = Callable[[Array, Array], tuple[float, Array, dict[str, float]]]
"""Log-probabilities and advantages to the policy's loss, its gradient by the log-probabilities, and metrics."""


def explicit_loss(
    model: ActorCritic, rows: Rows, policy: PolicyTerm, *, normalize: bool, value_coef: float, entropy_coef: float
) -> LossOutput:
    """`policy(logp, A) + value_coef mean((V - target)^2) / 2 - entropy_coef mean(H)` of rows without memory."""
    assert model.lean is not None
    n = len(rows)
    policy_net, value_net = model.lean
    x = model.encoder.in_numpy(rows.obs if not hasattr(rows.obs, "numpy") else rows.obs.numpy())
    policy_outputs, value_outputs = policy_net.forward(x), value_net.forward(x)
    params, value = model.with_std(policy_outputs[-1]), value_outputs[-1][:, 0]
    logp, entropy, pull = model.actions.explicit(params, rows.action.numpy())
    advantage = rows.advantage.numpy()
    if normalize and n > 1:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss, of_logp, metrics = policy(logp, advantage)
    error = value - rows.target.numpy()
    value_loss, spread = 0.5 * float(np.dot(error, error)) / n, float(entropy.mean())

    def backward() -> None:
        of_params = pull(of_logp, -entropy_coef / n)
        outputs = policy_outputs[-1].shape[1]
        policy_net.backward(x, policy_outputs, of_params[:, :outputs])
        if model.log_std is not None and model.log_std.grad is not None:
            model.log_std.grad.numpy()[:] += of_params[:, outputs:].sum(0)
        value_net.backward(x, value_outputs, (error * (value_coef / n))[:, None])

    loss = policy_loss + value_coef * value_loss - entropy_coef * spread
    said = {"loss/policy": policy_loss, "loss/value": value_loss, "loss/entropy": spread, **metrics}
    return LossOutput(loss, said, backward=backward)


def policy_gradient(logp: Array, advantage: Array) -> tuple[float, Array, dict[str, float]]:
    """`-mean(logp A)`."""
    n = len(logp)
    return -float(np.dot(logp, advantage)) / n, advantage * (-1.0 / n), {}
