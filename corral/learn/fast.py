"""Losses of small networks with hand-written gradients in NumPy: a third of torch's time on a few hundred rows.

An algorithm defines its loss once, in torch. The learner uses an entry of `FAST` instead if it implements every setting
in use and every field of the batch. Each entry is tested to equal the algorithm's own loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn

from corral.algos.base import Algorithm, UpdateContext
from corral.algos.trajectories import Minibatch, VtraceTargets, explained_variance, join_obs, successors
from corral.core.types import Array, LossOutput, Trajectory, Transitions
from corral.nets.actor_critic import ActorCritic
from corral.nets.q_network import QNetwork

if TYPE_CHECKING:
    from corral.algos.a2c import A2c
    from corral.algos.appo import Appo
    from corral.algos.dqn import Dqn
    from corral.algos.impala import Impala
    from corral.algos.ppo import Ppo
    from corral.algos.search.ppo_search import PpoSearch


@dataclass(frozen=True)
class FastLoss:
    """A loss with a hand-written gradient, and which settings and batch fields it implements."""

    compute: Callable[[Any, Any, Any, Any, UpdateContext], LossOutput]
    """Maps algorithm, network, target network, minibatch and context to a loss, as `Algorithm.losses` yields it."""
    settings: frozenset[str]
    """Settings that it implements or that do not affect the loss; others must have their defaults."""
    batch: frozenset[str]
    """Fields of a minibatch, or of a trajectory's extras, that it implements; others must be None or missing."""
    towers: bool = False
    """Whether the algorithm's own loss runs on NumPy towers for batches that this entry does not take."""

    def implements(self, config: Any) -> bool:
        """Whether all settings that differ from their defaults are implemented."""
        default = type(config)()
        changed = {f.name for f in fields(config) if getattr(config, f.name) != getattr(default, f.name)}
        return changed <= self.settings

    def takes(self, batch: Any) -> bool:
        """Whether all fields of a minibatch are implemented."""
        if isinstance(batch, Trajectory):
            return batch.extras.keys() <= self.batch
        return not any(_is_present(getattr(batch, name)) for name in _other_fields(batch.__class__, self.batch))


@cache
def _other_fields(batch: Any, implemented: frozenset[str]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(batch) if f.name not in implemented)


def _is_present(value: Any) -> bool:
    return value is not None and not (isinstance(value, dict) and not value)


def fast_entry(algo: Algorithm) -> FastLoss | None:
    """The table's entry for an algorithm, regardless of its settings."""
    return FAST.get(f"{type(algo).__module__}:{type(algo).__qualname__}")


def find_fast_loss(algo: Algorithm, model: nn.Module, target: nn.Module | None) -> FastLoss | None:
    """The entry for an algorithm with these settings and networks, or None to use its own loss.

    Matches exact classes only: a subclass may change the loss or the network.
    """
    entry = fast_entry(algo)
    if entry is None or not entry.implements(algo.config):  # type: ignore[attr-defined]
        return None
    networks = [model] if target is None else [model, target]
    return entry if all(_in_numpy(network) for network in networks) else None


def _in_numpy(network: nn.Module) -> bool:
    if type(network) is ActorCritic:
        return network.numpy_towers is not None
    return type(network) is QNetwork and bool(network.numpy_towers)


def ppo_loss(algo: Ppo, model: ActorCritic, target: None, batch: Minibatch, ctx: UpdateContext) -> LossOutput:
    """`Ppo.losses`."""
    clip = algo.clip_coef(ctx.progress)

    def policy_term(log_prob: Array, advantages: Array) -> _PolicyTerm:
        return clipped_surrogate(log_prob, batch.old_log_prob.numpy(), advantages, clip)

    config = algo.config
    output = _on_policy_loss(model, batch, policy_term, config.normalize_advantage, config.vf_coef, config.ent_coef)
    output.stop = algo.is_past_target_kl(output.metrics["loss/kl"])
    return output


def ppo_search_loss(
    algo: PpoSearch, model: ActorCritic, target: None, batch: Minibatch, ctx: UpdateContext
) -> LossOutput:
    """`PpoSearch.losses` for a batch without searches, which is PPO's loss."""
    return ppo_loss(algo.ppo, model, target, batch, ctx)


def a2c_loss(algo: A2c, model: ActorCritic, target: None, batch: Minibatch, ctx: UpdateContext) -> LossOutput:
    """`A2c.losses`."""
    config = algo.config
    return _on_policy_loss(model, batch, policy_gradient, config.normalize_advantage, config.vf_coef, config.ent_coef)


class _PolicyTerm(NamedTuple):
    loss: float
    grad: Array
    """With respect to the log-probabilities."""
    metrics: dict[str, float]


def _on_policy_loss(
    model: ActorCritic,
    batch: Minibatch,
    policy_term: Callable[[Array, Array], _PolicyTerm],
    normalize: bool,
    value_coef: float,
    entropy_coef: float,
) -> LossOutput:
    """`policy_term(log_prob, A) + value_coef mean((V - R)^2) / 2 - entropy_coef mean(H)`."""
    assert model.numpy_towers is not None
    n = len(batch)
    policy_net, value_net = model.numpy_towers
    x = model.encoder.in_numpy(batch.obs if not hasattr(batch.obs, "numpy") else batch.obs.numpy())
    policy_outputs, value_outputs = policy_net.forward(x), value_net.forward(x)
    params, values = model.with_std(policy_outputs[-1]), value_outputs[-1][:, 0]
    log_prob, entropy, pullback = model.actions.evaluate_numpy(params, batch.action.numpy())
    advantages = batch.advantages.numpy()
    if normalize:
        advantages = _normalize(advantages)
    policy_loss, grad_log_prob, metrics = policy_term(log_prob, advantages)
    error = values - batch.returns.numpy()
    value_loss, entropy_mean = 0.5 * float(np.dot(error, error)) / n, float(entropy.mean())

    def backward() -> None:
        _policy_backward(model, x, policy_outputs, pullback(grad_log_prob, -entropy_coef / n))
        value_net.backward(x, value_outputs, (error * (value_coef / n))[:, None])

    loss = policy_loss + value_coef * value_loss - entropy_coef * entropy_mean
    metrics = {"loss/policy": policy_loss, "loss/value": value_loss, "loss/entropy": entropy_mean, **metrics}
    return LossOutput(loss, metrics, rows=n, backward=backward)


def impala_loss(algo: Impala, model: ActorCritic, target: None, batch: Trajectory, ctx: UpdateContext) -> LossOutput:
    """`Impala.losses`."""

    def policy_term(log_prob: Array, behaviour: Array, advantages: Array) -> _PolicyTerm:
        loss, grad, _ = policy_gradient(log_prob, advantages)
        log_ratio = log_prob - behaviour
        return _PolicyTerm(loss, grad, {"loss/kl": float((np.exp(log_ratio) - 1 - log_ratio).mean())})

    config = algo.config
    return _stale_loss(model, batch, algo.vtrace, policy_term, config.vf_coef, config.ent_coef, summed=True)


def appo_loss(algo: Appo, model: ActorCritic, target: None, batch: Trajectory, ctx: UpdateContext) -> LossOutput:
    """`Appo.losses`."""
    config, clip = algo.config, algo.clip_coef(ctx.progress)

    def policy_term(log_prob: Array, behaviour: Array, advantages: Array) -> _PolicyTerm:
        if config.normalize_advantage:
            advantages = _normalize(advantages)
        return clipped_surrogate(log_prob, behaviour, advantages, clip)

    return _stale_loss(model, batch, algo.vtrace, policy_term, config.vf_coef, config.ent_coef, summed=False)


def _stale_loss(
    model: ActorCritic,
    traj: Trajectory,
    vtrace: VtraceTargets,
    policy_term: Callable[[Array, Array, Array], _PolicyTerm],
    value_coef: float,
    entropy_coef: float,
    *,
    summed: bool,
) -> LossOutput:
    """`policy_term(log_prob, behaviour, A) + value_coef mean((V - v)^2) / 2 - entropy_coef mean(H)`.

    `A` and `v` are V-trace's. With `summed`, everything is multiplied by the number of rows.
    """
    assert model.numpy_towers is not None
    policy_net, value_net = model.numpy_towers
    n, width = traj.reward.size, traj.shape[1]
    x = model.encoder.in_numpy(join_obs(traj))
    policy_outputs, value_outputs = policy_net.forward(x[:n]), value_net.forward(x)
    log_prob, entropy, pullback = model.actions.evaluate_numpy(
        model.with_std(policy_outputs[-1]), traj.extras["action"].reshape(n, -1)
    )
    values = value_outputs[-1][:, 0]
    value, last_values = values[:n], values[n:]
    next_values = successors(traj, value.reshape(traj.shape), last_values)
    targets, advantages = vtrace(traj, log_prob.reshape(traj.shape), value.reshape(-1, width), next_values)
    rows = np.flatnonzero(~traj.faulty) if traj.faulty.any() else slice(None)
    grad_log_prob = np.zeros(n, np.float32)
    policy_loss, grad_log_prob[rows], metrics = policy_term(
        log_prob[rows], traj.extras["logp"].reshape(-1)[rows], advantages.reshape(-1)[rows]
    )
    error, count = value - targets.reshape(-1), len(log_prob[rows])
    value_loss, entropy_mean = 0.5 * float(np.dot(error, error)) / count, float(entropy[rows].mean())
    scale = count if summed else 1

    def backward() -> None:
        grad_params = pullback(grad_log_prob * np.float32(scale), -entropy_coef * scale / count)
        grad_params[traj.faulty.reshape(-1)] = 0
        _policy_backward(model, x[:n], policy_outputs, grad_params)
        outputs = [layer[:n] for layer in value_outputs]
        value_net.backward(x[:n], outputs, (error * (value_coef * scale / count))[:, None])

    loss = (policy_loss + value_coef * value_loss - entropy_coef * entropy_mean) * scale
    metrics = {"loss/policy": policy_loss, "loss/value": value_loss, "loss/entropy": entropy_mean, **metrics}
    metrics["loss/explained_variance"] = explained_variance(value[rows], targets.reshape(-1)[rows])
    return LossOutput(loss, metrics, rows=0 if summed else count, backward=backward)


def _policy_backward(model: ActorCritic, x: Array, outputs: list[Array], grad_params: Array) -> None:
    assert model.numpy_towers is not None
    size = outputs[-1].shape[1]
    model.numpy_towers[0].backward(x, outputs, grad_params[:, :size])
    if model.log_std is not None and model.log_std.grad is not None:
        model.log_std.grad.numpy()[:] += grad_params[:, size:].sum(0)


def policy_gradient(log_prob: Array, advantages: Array) -> _PolicyTerm:
    """`-mean(log_prob A)`."""
    n = len(log_prob)
    return _PolicyTerm(-float(np.dot(log_prob, advantages)) / n, advantages * (-1.0 / n), {})


def clipped_surrogate(log_prob: Array, old_log_prob: Array, advantages: Array, clip: float) -> _PolicyTerm:
    """`-mean(min(r A, clip(r, 1 - eps, 1 + eps) A))`, `r = exp(log_prob - old_log_prob)`, of rows `[n]`.

    Its gradient by `log_prob` is `-r A / n` where the first term is smaller, and 0 where the ratio is clipped.
    """
    n = len(log_prob)
    log_ratio = log_prob - old_log_prob
    ratio = np.exp(log_ratio)
    plain = ratio * advantages
    bounded = np.minimum(np.maximum(ratio, 1 - clip), 1 + clip) * advantages
    grad = np.where(plain <= bounded, plain, 0.0)
    grad *= -1.0 / n
    excess = ratio - 1.0
    kl = float((excess - log_ratio).sum()) / n
    clip_fraction = np.count_nonzero(np.abs(excess) > clip) / n
    loss = -float(np.minimum(plain, bounded).sum()) / n
    return _PolicyTerm(loss, grad, {"loss/kl": kl, "loss/clip_fraction": clip_fraction})


def _normalize(advantages: Array) -> Array:
    if len(advantages) < 2:
        return advantages
    normalized: Array = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return normalized


def dqn_loss(algo: Dqn, model: QNetwork, target: QNetwork, batch: Transitions, ctx: UpdateContext) -> LossOutput:
    """`Dqn.losses`: the gradient of the Huber loss is the temporal difference clipped to [-1, 1]."""
    rows, action_index = np.arange(len(batch.reward)), algo.choices.from_env(batch.action)
    next_q = target.numpy_values(batch.next_obs)
    best = (model.numpy_values(batch.next_obs) if algo.config.double_q else next_q).argmax(-1)
    td_target = batch.reward + batch.discount * next_q[rows, best]
    values, pullback = model.evaluate_numpy(model.encoder.in_numpy(batch.obs))
    q = values[rows, action_index]
    error = q - td_target
    slope = np.clip(error, -1.0, 1.0)
    loss = slope * (error - 0.5 * slope)  # e^2 / 2 within [-1, 1], |e| - 1/2 beyond
    if algo.config.prioritized_replay:
        loss, slope = loss * batch.weight, slope * batch.weight

    def backward() -> None:
        grad = np.zeros_like(values)
        grad[rows, action_index] = slope / np.float32(len(rows))
        pullback(grad)

    metrics = {"loss/td": float(loss.mean()), "loss/q": float(q.mean())}
    priorities = np.abs(error) if algo.config.prioritized_replay else None
    return LossOutput(metrics["loss/td"], metrics, priorities, rows=len(batch.reward), backward=backward)


_ROWS = frozenset({"obs", "action", "old_log_prob", "old_values", "advantages", "returns", "explained_variance"})
_TRANSITIONS = frozenset({"obs", "action", "reward", "discount", "next_obs", "weight"})
_EXTRAS = frozenset({"action", "logp"})
_COMMON = "learning_rate anneal_lr gamma num_steps ent_coef vf_coef max_grad_norm net"
_SETTINGS = {
    "ppo": f"{_COMMON} gae_lambda update_epochs num_minibatches clip_coef target_kl normalize_advantage",
    "a2c": f"{_COMMON} optimizer gae_lambda normalize_advantage",
    "impala": f"{_COMMON} optimizer batch_size vtrace vtrace_rho vtrace_c replay_fraction buffer_size max_policy_lag",
    "appo": f"{_COMMON} batch_size update_epochs num_minibatches clip_coef normalize_advantage vtrace_rho vtrace_c "
    "max_policy_lag",
    "dqn": "learning_rate anneal_lr gamma batch_size buffer_size learning_starts train_frequency gradient_steps "
    "target_update_period tau n_step double_q dueling prioritized_replay prioritized_replay_alpha "
    "prioritized_replay_beta prioritized_replay_eps exploration_initial_eps exploration_final_eps "
    "exploration_fraction epsilon_ladder max_grad_norm net",
    "ppo_search": "search_mode num_simulations search_fraction search_acts_fraction random_action_fraction root_noise "
    "temperature distill_coef search_value_fraction min_explained_variance max_importance_weight search ppo",
}


def _settings(name: str) -> frozenset[str]:
    return frozenset(_SETTINGS[name].split())


FAST: dict[str, FastLoss] = {
    "corral.algos.ppo:Ppo": FastLoss(ppo_loss, _settings("ppo"), _ROWS),
    "corral.algos.a2c:A2c": FastLoss(a2c_loss, _settings("a2c"), _ROWS),
    "corral.algos.impala:Impala": FastLoss(impala_loss, _settings("impala"), _EXTRAS),
    "corral.algos.appo:Appo": FastLoss(appo_loss, _settings("appo"), _EXTRAS),
    "corral.algos.dqn:Dqn": FastLoss(dqn_loss, _settings("dqn"), _TRANSITIONS),
    "corral.algos.search.ppo_search:PpoSearch": FastLoss(ppo_search_loss, _settings("ppo_search"), _ROWS, towers=True),
}
"""By module and class, so that the table imports no algorithm."""
