"""Losses of small networks with their gradients written out, in NumPy.

The same losses as the algorithms state in torch, and tested to be equal to them; on a few hundred rows of an MLP
they take a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from corral.algos.trajectories import Minibatch, VtraceTargets, successors
from corral.core.types import Array, LossOutput, Trajectory, tree_map
from corral.nets.actor_critic import ActorCritic

PolicyTerm = Callable[[Array, Array], tuple[float, Array, dict[str, float]]]
"""Log-probabilities and advantages to the policy's loss, its gradient by the log-probabilities, and metrics."""
StalePolicyTerm = Callable[[Array, Array, Array], tuple[float, Array, dict[str, float]]]
"""The same, with the log-probabilities of the policy that acted in between."""


def explicit_loss(
    model: ActorCritic, rows: Minibatch, policy: PolicyTerm, *, normalize: bool, value_coef: float, entropy_coef: float
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
        _policy_backward(model, x, policy_outputs, pull(of_logp, -entropy_coef / n))
        value_net.backward(x, value_outputs, (error * (value_coef / n))[:, None])

    loss = policy_loss + value_coef * value_loss - entropy_coef * spread
    said = {"loss/policy": policy_loss, "loss/value": value_loss, "loss/entropy": spread, **metrics}
    return LossOutput(loss, said, rows=n, backward=backward)


def explicit_stale_loss(
    model: ActorCritic, traj: Trajectory, correction: VtraceTargets, policy: StalePolicyTerm, *, summed: bool,
    value_coef: float, entropy_coef: float,
) -> LossOutput:  # fmt: skip
    """`policy(logp, old_logp, A) + value_coef mean((V - v)^2) / 2 - entropy_coef mean(H)` of sequences without memory.

    `A` and `v` are the correction's. All of it times the number of rows where the loss is `summed`.
    """
    assert model.lean is not None
    policy_net, value_net = model.lean
    n, width = traj.reward.size, traj.shape[1]
    x = model.encoder.in_numpy(tree_map(_joined, traj.obs, traj.final_obs))
    policy_outputs, value_outputs = policy_net.forward(x[:n]), value_net.forward(x)
    logp, entropy, pull = model.actions.explicit(
        model.with_std(policy_outputs[-1]), traj.extras["action"].reshape(n, -1)
    )
    values = value_outputs[-1][:, 0]
    value, beyond = values[:n], values[n:]
    after = successors(traj, value.reshape(traj.shape), beyond)
    target, advantage = correction(traj, logp.reshape(traj.shape), value.reshape(-1, width), after)
    rows = np.flatnonzero(~traj.faulty) if traj.faulty.any() else slice(None)
    of_logp = np.zeros(n, np.float32)
    policy_loss, of_logp[rows], metrics = policy(
        logp[rows], traj.extras["logp"].reshape(-1)[rows], advantage.reshape(-1)[rows]
    )
    error, count = value - target.reshape(-1), len(logp[rows])
    value_loss, spread = 0.5 * float(np.dot(error, error)) / count, float(entropy[rows].mean())
    scale = count if summed else 1

    def backward() -> None:
        of_params = pull(of_logp * np.float32(scale), -entropy_coef * scale / count)
        of_params[traj.faulty.reshape(-1)] = 0
        _policy_backward(model, x[:n], policy_outputs, of_params)
        outputs = [layer[:n] for layer in value_outputs]
        value_net.backward(x[:n], outputs, (error * (value_coef * scale / count))[:, None])

    loss = (policy_loss + value_coef * value_loss - entropy_coef * spread) * scale
    said = {"loss/policy": policy_loss, "loss/value": value_loss, "loss/entropy": spread, **metrics}
    return LossOutput(loss, said, rows=0 if summed else count, backward=backward)


def _joined(obs: Array, final: Array) -> Array:
    """Rows of sequences `[T + 1, B]`, then the last observations of episodes, one below the other."""
    return np.concatenate([obs.reshape(-1, *obs.shape[2:]), final])


def _policy_backward(model: ActorCritic, x: Array, outputs: list[Array], of_params: Array) -> None:
    assert model.lean is not None
    size = outputs[-1].shape[1]
    model.lean[0].backward(x, outputs, of_params[:, :size])
    if model.log_std is not None and model.log_std.grad is not None:
        model.log_std.grad.numpy()[:] += of_params[:, size:].sum(0)


def policy_gradient(logp: Array, advantage: Array) -> tuple[float, Array, dict[str, float]]:
    """`-mean(logp A)`."""
    n = len(logp)
    return -float(np.dot(logp, advantage)) / n, advantage * (-1.0 / n), {}
