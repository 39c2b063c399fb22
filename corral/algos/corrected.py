"""What the algorithms for stale data share: one forward pass over whole sequences, and V-trace on what it says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from corral.acting.model_policy import to_tensors
from corral.core.types import Array, Trajectory, tree_map
from corral.nets.actor_critic import ActorCritic
from corral.ops.vtrace import vtrace


@dataclass(frozen=True)
class Correction:
    """V-trace with its constants. Without `on`, the data is taken for the current policy's own.

    Without `rho_pg`, advantages come without the ratio, for an objective that has it already.
    """

    gamma: float
    rho_bar: float
    c_bar: float
    rho_pg: float | None
    on: bool = True

    def __call__(self, traj: Trajectory, logp: Array, value: Array, after: Array) -> tuple[Array, Array]:
        """Targets of the value and advantages, from what the current network says of `[T, B]` rows."""
        behaviour = traj.extras["logp"]
        return vtrace(
            behaviour, logp if self.on else behaviour, traj.reward, value, after,
            traj.terminated, traj.truncated, traj.faulty,
            self.gamma, self.rho_bar, self.c_bar, self.rho_pg,
        )  # fmt: skip


@dataclass
class Seen:
    """What the network says now of sequences `[T, B]`; only `after`, the values of true successors, has no graph."""

    logp: Tensor
    entropy: Tensor
    value: Tensor
    after: Array


def look(model: ActorCritic, traj: Trajectory) -> Seen:
    """Every row once with its graph; last observations of sequences and of episodes once more, without."""
    device, shape = model.value_head.weight.device, traj.shape
    obs = to_tensors(tree_map(lambda leaf: leaf[:-1], traj.obs), device)
    states: Tensor | None = None
    if model.core is None:
        params, value = model(tree_map(lambda leaf: leaf.flatten(0, 1), obs))
        params, value = params.unflatten(0, shape), value.unflatten(0, shape)
    else:
        state, first = to_tensors((traj.extras["state"][0], traj.first[:-1]), device)
        params, value, states = model.unroll(obs, state, first)
    logp, entropy = model.actions.evaluate(params.float(), to_tensors(traj.extras["action"], device))
    value = value.float()
    after = successors(traj, value.detach().cpu().numpy(), _beyond(model, traj, states))
    return Seen(logp, entropy, value, after)


@torch.no_grad()
def _beyond(model: ActorCritic, traj: Trajectory, states: Tensor | None) -> Array:
    """Values of the last observation of every sequence, then of those of the episodes that ended within."""
    device = model.value_head.weight.device
    obs = to_tensors(tree_map(lambda leaf, final: np.concatenate([leaf[-1], final]), traj.obs, traj.final_obs), device)
    if states is None:
        return model.value(obs).float().cpu().numpy()
    t, b = to_tensors((traj.final_at[:, 0], traj.final_at[:, 1]), device)
    memory = torch.cat([states[-1], states[t, b]])  # it goes on into an episode's last observation
    first = to_tensors(np.concatenate([traj.first[-1], np.zeros(len(traj.final_at), np.bool_)]), device)
    value = model.unroll(tree_map(lambda leaf: leaf.unsqueeze(0), obs), memory, first.unsqueeze(0))[1][0]
    return value.float().cpu().numpy()


def successors(traj: Trajectory, value: Array, beyond: Array) -> Array:
    """Values of every true successor `[T, B]`, from those of the rows and what `_beyond` says."""
    width = traj.shape[1]
    after = np.concatenate([value[1:], beyond[None, :width]])
    after[traj.final_at[:, 0], traj.final_at[:, 1]] = beyond[width:]
    return after
