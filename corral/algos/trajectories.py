"""Shared by the algorithms: rows and values of a trajectory, its steps as a minibatch, explained variance, V-trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from corral.acting.model_policy import ActorCriticPolicy, read_tensors, to_tensors
from corral.acting.policy import Policy
from corral.algos.base import Algorithm
from corral.core.types import Array, Trajectory, Tree, tree_map
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.returns import gae, vtrace

C = TypeVar("C")


class ActorCriticAlgorithm(Algorithm, Generic[C]):
    """An algorithm with an `ActorCritic` of its `config.net`, and by default a policy that samples from it."""

    config: C

    def build_model(self) -> ActorCritic:
        return ActorCritic(self.spec, self.config.net)  # type: ignore[attr-defined]

    def make_policy(self, model: ActorCritic, *, explore: bool, rng: np.random.Generator, index: int = 0) -> Policy:
        return ActorCriticPolicy(model, explore, rng)


@dataclass
class Minibatch:
    """Steps to learn from: `[n]`, or `[T, B]` for a recurrent network.

    For a recurrent network, `state` is the recurrent state at the start of the sequences, `first` marks where it is
    reset, and `mask` the valid steps; otherwise invalid steps are left out.
    """

    obs: Tree
    action: Tensor
    old_log_prob: Tensor  # log-probability of the action by the policy that acted
    old_values: Tensor  # values of the observations by the network before the update
    advantages: Tensor
    returns: Tensor  # value targets
    first: Tensor | None = None
    state: Tensor | None = None
    mask: Tensor | None = None
    explained_variance: float = math.nan  # of the returns of the whole batch, by the values before the update

    def __len__(self) -> int:
        return len(self.old_values) if self.state is None else self.old_values.shape[1]


R = TypeVar("R", bound=Minibatch)


def recorded_extras(net: NetConfig) -> tuple[str, ...]:
    """Extras that `ActorCriticPolicy` records for a network with these settings."""
    return ("action", "logp") if net.rnn == "none" else ("action", "logp", "state")


def join_obs(traj: Trajectory) -> Tree:
    """The observations `[T + 1, B]` as rows, followed by the final observations of episodes."""
    return tree_map(
        lambda obs, final: np.concatenate([obs.reshape(-1, *obs.shape[2:]), final]), traj.obs, traj.final_obs
    )


@torch.no_grad()
def compute_values(model: ActorCritic, traj: Trajectory) -> tuple[Array, Array]:
    """Values of all observations acted on, and of all true successors, both `[T, B]`."""
    device = model.value_head.weight.device
    if model.core is None:
        (value,) = read_tensors([model.value(to_tensors(join_obs(traj), device))])
        count = traj.first.size
        value, final = value[:count].reshape(traj.first.shape), value[count:]
    else:
        obs, first, state = to_tensors((traj.obs, traj.first, traj.extras["state"][0]), device)
        _, values, states = model.unroll(obs, state, first)
        finals = values[0, :0]
        if len(traj.final_at):  # the recurrent state carries over to an episode's final observation
            t, b = to_tensors((traj.final_at[:, 0], traj.final_at[:, 1]), device)
            last = tree_map(lambda leaf: leaf.unsqueeze(0), to_tensors(traj.final_obs, device))
            not_first = torch.zeros(1, len(t), dtype=torch.bool, device=device)
            finals = model.unroll(last, states[t, b], not_first)[1][0]
        value, final = read_tensors([values, finals])
    after = value[1:].copy()
    after[traj.final_at[:, 0], traj.final_at[:, 1]] = final
    return value[:-1], after


def flatten_steps(
    model: ActorCritic,
    traj: Trajectory,
    values: Array,
    advantages: Array,
    returns: Array,
    kind: type[R] = Minibatch,  # type: ignore[assignment]
    more: Mapping[str, Array] | None = None,
) -> R:
    """The trajectory's steps with their computed targets, on the network's device; `more` are further columns."""
    device = model.value_head.weight.device
    obs = tree_map(lambda leaf: leaf[:-1], traj.obs)
    arrays = {
        "obs": obs,
        "action": traj.extras["action"],
        "old_log_prob": traj.extras["logp"],
        "old_values": values,
        "advantages": advantages.astype(np.float32),
        "returns": returns.astype(np.float32),
        **(more or {}),
    }
    explained = explained_variance(values[traj.valid], arrays["returns"][traj.valid])
    if model.recurrent:
        arrays |= {"first": traj.first[:-1], "state": traj.extras["state"][0], "mask": traj.valid}
    else:
        arrays = {name: tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree) for name, tree in arrays.items()}
        if traj.faulty.any():
            valid = traj.valid.reshape(-1)
            arrays = {name: tree_map(lambda leaf: leaf[valid], tree) for name, tree in arrays.items()}
    return kind(**to_tensors(arrays, device), explained_variance=explained)


def gae_steps(model: ActorCritic, traj: Trajectory, gamma: float, gae_lambda: float) -> Minibatch:
    """The trajectory's steps with advantages by GAE, and `advantage + value` as value targets."""
    values, next_values = compute_values(model, traj)
    advantages = gae(traj.reward, values, next_values, traj.terminated, traj.truncated, traj.faulty, gamma, gae_lambda)
    return flatten_steps(model, traj, values, advantages, advantages + values)


def shuffled_minibatches(batch: R, num_minibatches: int, rng: torch.Generator) -> Iterator[R]:
    """All rows, or all sequences of a recurrent network, in random order, in minibatches of about equal size."""
    order = to_tensors(torch.randperm(len(batch), generator=rng), batch.old_values.device)
    axis = 0 if batch.state is None else 1

    names = [f.name for f in fields(batch) if not isinstance(getattr(batch, f.name), float | None)]

    def taken(name: str, index: Tensor) -> Tree:
        return tree_map(lambda leaf: leaf.index_select(0 if name == "state" else axis, index), getattr(batch, name))

    for index in order.tensor_split(num_minibatches) if num_minibatches > 1 else (order,):
        if len(index):
            yield replace(batch, **{name: taken(name, index) for name in names})


def evaluate_actions(model: ActorCritic, batch: Minibatch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the batch's actions, entropies, and values by the current network."""
    if batch.state is None:
        params, values = model(batch.obs)
    else:
        assert batch.first is not None
        params, values, _ = model.unroll(batch.obs, batch.state, batch.first)
    return *model.actions.evaluate(params, batch.action), values


def explained_variance(values: Any, returns: Any) -> Any:
    """1 - Var(returns - values) / Var(returns): 1 for perfect values, NaN for constant returns. Arrays or tensors."""
    error, n = returns - values, max(1, len(returns))
    error, centered = error - error.sum() / n, returns - returns.sum() / n  # ten times faster than np.var
    variance, unexplained = centered @ centered, error @ error
    if isinstance(variance, Tensor):
        return torch.where(variance > 0, 1 - unexplained / variance, math.nan)
    return 1 - float(unexplained) / float(variance) if variance > 0 else math.nan


def num_valid(batch: Minibatch) -> int | Tensor:
    """Number of valid (unmasked) steps."""
    return len(batch) if batch.mask is None else batch.mask.sum()


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the valid steps."""
    return values.mean() if mask is None else (values * mask).sum() / mask.sum().clamp(min=1)


def normalize(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Values with mean 0 and deviation 1 over the valid steps; a single one is unchanged."""
    if mask is not None and values.device.type != "cpu":  # where the number of valid steps would have to be read
        centered = values - masked_mean(values, mask)
        normalized = centered / (masked_mean(centered.square(), mask).sqrt() + 1e-8)
        return torch.where(mask.sum() > 1, normalized, values)
    used = values if mask is None else values[mask]
    return (values - used.mean()) / (used.std(correction=0) + 1e-8) if len(used) > 1 else values


@dataclass(frozen=True)
class VtraceTargets:
    """V-trace with its constants. Without `on`, the data is treated as on-policy.

    `rho_bar` and `c_bar` are the truncation levels of Espeholt et al. (2018); `rho_pg` is that of the ratio in the
    advantages. Without `rho_pg`, advantages lack the ratio, for an objective that contains it already.
    """

    gamma: float
    rho_bar: float
    c_bar: float
    rho_pg: float | None
    on: bool = True

    def __call__(self, traj: Trajectory, logp: Any, value: Any, after: Any) -> tuple[Any, Any]:
        """Value targets and advantages, from the current network's log-probabilities and values of `[T, B]` rows.

        All are arrays, or tensors on the network's device.
        """
        columns = traj.extras["logp"], traj.reward, traj.terminated, traj.truncated, traj.faulty
        if isinstance(value, Tensor):
            columns = to_tensors(columns, value.device)
        behaviour, reward, terminated, truncated, faulty = columns
        return vtrace(
            behaviour, logp if self.on else behaviour, reward, value, after, terminated, truncated, faulty,
            self.gamma, self.rho_bar, self.c_bar, self.rho_pg,
        )  # fmt: skip

    def of_outputs(self, traj: Trajectory, out: SequenceOutput) -> tuple[Tensor, Tensor]:
        """The same from a forward pass; in NumPy on the CPU, where that is faster."""
        log_prob, values = out.log_prob.detach(), out.values.detach()
        if values.device.type != "cpu":
            return self(traj, log_prob, values, out.next_values)
        returns, advantages = self(traj, log_prob.numpy(), values.numpy(), out.next_values.numpy())
        return torch.from_numpy(returns), torch.from_numpy(advantages)


@dataclass
class SequenceOutput:
    """The network's outputs for sequences `[T, B]`; `next_values`, of the true successors, are detached."""

    log_prob: Tensor
    entropy: Tensor
    values: Tensor
    next_values: Tensor
    rows: Tensor
    """Numbers of the valid rows, of all `T * B`."""

    def valid(self, values: Tensor) -> Tensor:
        """The values `[n]` of the valid rows. Rows chosen by a mask would have to be counted by the CPU."""
        return values.flatten().index_select(0, self.rows)


def forward_sequences(model: ActorCritic, traj: Trajectory) -> SequenceOutput:
    """Forward pass with gradients for all rows; values of final observations are computed without gradients."""
    device, shape = model.value_head.weight.device, traj.shape
    obs = to_tensors(tree_map(lambda leaf: leaf[:-1], traj.obs), device)
    states: Tensor | None = None
    if model.core is None:
        params, value = model(tree_map(lambda leaf: leaf.flatten(0, 1), obs))
        params, value = params.unflatten(0, shape), value.unflatten(0, shape)
    else:
        state, first = to_tensors((traj.extras["state"][0], traj.first[:-1]), device)
        params, value, states = model.unroll(obs, state, first)
    logp, entropy = model.actions.evaluate(params, to_tensors(traj.extras["action"], device))
    after = successors(traj, value.detach(), _last_values(model, traj, states))
    return SequenceOutput(logp, entropy, value, after, to_tensors(np.flatnonzero(traj.valid), device))


@torch.no_grad()
def _last_values(model: ActorCritic, traj: Trajectory, states: Tensor | None) -> Tensor:
    """Values of the last observation of every sequence, then of the final observations of episodes."""
    device = model.value_head.weight.device
    obs = to_tensors(tree_map(lambda leaf, final: np.concatenate([leaf[-1], final]), traj.obs, traj.final_obs), device)
    if states is None:
        return model.value(obs)
    t, b = to_tensors((traj.final_at[:, 0], traj.final_at[:, 1]), device)
    memory = torch.cat([states[-1], states[t, b]])  # it carries over to an episode's final observation
    first = to_tensors(np.concatenate([traj.first[-1], np.zeros(len(traj.final_at), np.bool_)]), device)
    return model.unroll(tree_map(lambda leaf: leaf.unsqueeze(0), obs), memory, first.unsqueeze(0))[1][0]


def successors(traj: Trajectory, value: Any, last_values: Any) -> Any:
    """Values of all true successors `[T, B]`, from those of the rows and the last ones; arrays or tensors."""
    width, where = traj.shape[1], (traj.final_at[:, 0], traj.final_at[:, 1])
    xp: Any = np
    if isinstance(value, Tensor):
        xp, where = torch, to_tensors(where, value.device)
    after = xp.concatenate([value[1:], last_values[None, :width]])
    after[where] = last_values[width:]
    return after
