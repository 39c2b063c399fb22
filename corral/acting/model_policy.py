"""Policies that act with a network: actor-critics by sampling, Q-networks by epsilon-greedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from corral.acting.policy import ActContext
from corral.core.errors import RunFailed
from corral.core.types import Array, Tree, tree_map

if TYPE_CHECKING:
    from corral.nets.actor_critic import ActorCritic
    from corral.nets.q_network import QNetwork


class ActorCriticPolicy:
    """Samples from the policy, or takes its most likely action.

    Records `action` in the network's representation, before bounds are applied, and its `logp`; for recurrent networks
    also `state`, the recurrent state before the step.
    """

    def __init__(self, model: ActorCritic, explore: bool, rng: np.random.Generator):
        self._model, self._explore, self._rng = model, explore, rng
        self._device = model.value_head.weight.device

    def initial_state(self, n: int) -> Tree:
        return self._model.initial_state(n)

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        model, actions = self._model, self._model.actions
        params, after = (model.numpy_params(obs), None) if model.numpy_towers else self._forward(obs, state, first)
        if np.count_nonzero(np.isfinite(params)) != params.size:
            raise RunFailed("The policy's outputs are no longer finite; train again with a lower learning_rate.")
        if self._explore:
            action, logp = actions.sample(params, self._rng)
        else:
            action, logp = actions.mode(params), np.zeros(len(params), np.float32)
        extras = {"action": action, "logp": logp}
        if after is not None:
            extras["state"] = state
        return actions.to_env(action), after, extras

    @torch.inference_mode()
    def _forward(self, obs: Tree, state: Tree, first: Array) -> tuple[Array, Array | None]:
        model, device = self._model, self._device
        if model.core is None:
            return model.act(to_tensors(obs, device), None, None)[0].cpu().numpy(), None
        params, after = model.act(to_tensors(obs, device), to_tensors(state, device), to_tensors(first, device))
        assert after is not None
        return tuple(read_tensors([params, after]))  # type: ignore[return-value]


class EpsilonGreedyPolicy:
    """The action with the highest value, or a random one with probability `epsilon(progress)`."""

    def __init__(
        self,
        model: QNetwork,
        to_env: Callable[[Array], Tree],
        num_actions: int,
        epsilon: Callable[[float], float],
        rng: np.random.Generator,
    ):
        self._model, self._to_env, self._num_actions, self._epsilon = model, to_env, num_actions, epsilon
        self._rng = rng
        self._progress = 0.0

    def set_context(self, ctx: ActContext) -> None:
        self._progress = ctx.progress

    def initial_state(self, n: int) -> Tree:
        return None

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        return self._to_env(self._choose(obs, self._epsilon(self._progress), len(first))), None, {}

    def _choose(self, obs: Tree, epsilon: float | Array, n: int) -> Array:
        # Always drawn, so that the schedule of epsilon does not change the random stream.
        draws = self._rng.random((n, 2)).T
        random = draws[0] < epsilon
        if random.all():
            choice = np.zeros(n, np.int64)
        else:
            choice = q_values(self._model, obs).argmax(-1)
        if random.any():
            choice = np.where(random, (draws[1] * self._num_actions).astype(np.int64), choice)
        return choice


class LadderPolicy(EpsilonGreedyPolicy):
    """Each environment has its own constant epsilon, carried as its policy state.

    `index` is the number of this actor; all actors have the same number of environments.
    """

    def __init__(
        self,
        model: QNetwork,
        to_env: Callable[[Array], Tree],
        num_actions: int,
        rungs: Array,
        index: int,
        rng: np.random.Generator,
    ):
        super().__init__(model, to_env, num_actions, lambda progress: 0.0, rng)
        self._rungs, self._index = rungs, index

    def initial_state(self, n: int) -> Tree:
        return self._rungs[np.arange(self._index * n, (self._index + 1) * n) % len(self._rungs)]

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        return self._to_env(self._choose(obs, state, len(first))), state, {}


def q_values(model: QNetwork, obs: Tree) -> Array:
    """Values [n, actions] of a Q-network with its current weights."""
    if model.numpy_towers:
        return model.numpy_values(obs)
    with torch.inference_mode():
        return read_tensors([model(to_tensors(obs, next(model.parameters()).device))])[0]


def params_and_values(model: ActorCritic, obs: Tree) -> tuple[Array, Array]:
    """Policy parameters [n, P] and values [n] of a feed-forward network with its current weights."""
    if model.numpy_towers:
        return model.numpy_rows(obs)
    device = model.value_head.weight.device
    with torch.inference_mode():
        params, values = read_tensors(model(to_tensors(obs, device)))
        return params, values


def to_tensors(tree: Tree, device: torch.device) -> Tree:
    """Arrays as tensors on a device; on the CPU without a copy, elsewhere in float32 instead of float64."""
    if device.type == "cpu":
        return torch.from_numpy(tree) if isinstance(tree, np.ndarray) else tree_map(_to_cpu, tree)
    return tree_map(lambda leaf: _send(_to_cpu(leaf), device), tree)


def _to_cpu(leaf: Any) -> Tensor:
    return leaf if isinstance(leaf, Tensor) else torch.from_numpy(np.asarray(leaf))


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.dtype == torch.float64:  # MPS has none
        tensor = tensor.float()
    if device.type == "mps" or tensor.device.type != "cpu":  # MPS shares the CPU's memory, and has none to pin
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # from other memory the CPU would wait for the device


def read_tensors(tensors: Sequence[Tensor]) -> list[Array]:
    """Tensors as arrays of float32. For all of them together the CPU waits for the device once."""
    tensors = [tensor.detach().float() for tensor in tensors]
    away = [tensor.reshape(-1) for tensor in tensors if tensor.device.type != "cpu"]
    parts = iter(torch.split(torch.cat(away).cpu(), [len(tensor) for tensor in away]) if away else ())
    return [t.numpy() if t.device.type == "cpu" else next(parts).numpy().reshape(t.shape) for t in tensors]
