"""A policy and a value function of the same observations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from corral.core.types import Array, EnvSpec, Tree, tree_map
from corral.nets.config import NetConfig
from corral.nets.encoder import Encoder
from corral.nets.network import Network
from corral.nets.numpy_mlp import NumpyMlp, is_plain, make_numpy_mlp
from corral.nets.recurrent import Core
from corral.nets.torsos import linear, mlp
from corral.ops.distributions import Actions


class ActorCritic(Network):
    """Vectors go through two separate towers; images, and recurrent networks, through one shared encoder.

    Parameters of the action distribution are as `Actions` describes them. Standard deviations of continuous actions are
    free parameters that do not depend on the observation.
    """

    def __init__(self, spec: EnvSpec, config: NetConfig):
        super().__init__()
        self.actions = Actions(spec.action)
        self.encoder = Encoder(spec.observation, config)
        self.core: Core | None = None
        size, hidden = self.encoder.out_size, () if self.encoder.has_images else config.hidden_sizes
        separate = config.rnn == "none" and not self.encoder.has_images
        self.policy_torso = mlp(size, hidden, config.activation)
        self.value_torso = mlp(size, hidden, config.activation) if separate else self.policy_torso
        size = hidden[-1] if hidden else size
        if config.rnn != "none":
            self.core = Core(config.rnn, size, config.rnn_size)
            size = config.rnn_size
        numbers = self.actions.num_numbers
        self.policy_head = linear(size, self.actions.num_logits + numbers, 0.01)
        self.value_head = linear(size, 1, 1.0)
        self.log_std = nn.Parameter(torch.full((numbers,), config.log_std_init)) if numbers else None
        self._activation = config.activation
        self.numpy_towers: tuple[NumpyMlp, NumpyMlp] | None = None
        """Policy and value in NumPy, if they are plain layers whose weights have their final place in memory."""

    @property
    def recurrent(self) -> bool:
        return self.core is not None

    def initial_state(self, n: int) -> Tensor | None:
        return None if self.core is None else self.core.initial_state(n, self.value_head.weight.device)

    def act(self, obs: Tree, state: Tensor | None, first: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One step of `n` environments: parameters of their actions, and their new recurrent states."""
        features = self.encoder(obs)
        features = self.policy_torso(features)
        if self.core is None:
            return self._with_std(self.policy_head(features)), None
        assert state is not None
        assert first is not None
        out, states = self.core(features.unsqueeze(0), state, first.unsqueeze(0))
        return self._with_std(self.policy_head(out[0])), states[0]

    def forward(self, obs: Tree) -> tuple[Tensor, Tensor]:
        """Rows without recurrence: parameters `[n, P]` and values `[n]`."""
        features = self.encoder(obs)
        if self._learns_in_numpy and self.numpy_towers is not None:
            out, values = (tower.apply(features) for tower in self.numpy_towers)
            return self._with_std(out), values.squeeze(-1)
        policy = self.policy_torso(features)
        value = policy if self.value_torso is self.policy_torso else self.value_torso(features)
        return self._with_std(self.policy_head(policy)), self.value_head(value).squeeze(-1)

    def value(self, obs: Tree) -> Tensor:
        """Rows without recurrence: values `[n]` only."""
        features = self.encoder.in_parts(obs)
        if self.numpy_towers is not None and not torch.is_grad_enabled():
            return torch.from_numpy(self.numpy_towers[1].forward(features.detach().numpy())[-1][:, 0])
        if self._learns_in_numpy and self.numpy_towers is not None:
            return self.numpy_towers[1].apply(features).squeeze(-1)
        value: Tensor = self.value_head(self.value_torso(features)).squeeze(-1)
        return value

    def unroll(self, obs: Tree, state: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sequences `[T, B, ...]`: parameters, values, and the recurrent states after every row."""
        assert self.core is not None
        lead = first.shape
        features = self.policy_torso(self.encoder.in_parts(tree_map(lambda leaf: leaf.flatten(0, 1), obs)))
        out, states = self.core(features.unflatten(0, lead), state, first)
        return self._with_std(self.policy_head(out)), self.value_head(out).squeeze(-1), states

    def use_numpy(self) -> bool:
        self.numpy_towers = None
        plain = is_plain(self, ActorCritic, ("forward", "act", "value", "_with_std"))
        plain = plain and is_plain(self.encoder, Encoder)
        if not plain or self.core is not None or self.encoder.has_images or self.value_torso is self.policy_torso:
            return False
        policy = make_numpy_mlp(self.policy_torso, self.policy_head, self._activation)
        value = make_numpy_mlp(self.value_torso, self.value_head, self._activation)
        self.numpy_towers = None if policy is None or value is None else (policy, value)
        return self.numpy_towers is not None

    def numpy_params(self, obs: Tree) -> Array:
        assert self.numpy_towers is not None
        return self.with_std(self.numpy_towers[0](self.encoder.in_numpy(obs)))

    def numpy_rows(self, obs: Tree) -> tuple[Array, Array]:
        """Parameters `[n, P]` and values `[n]` in NumPy, for planning: BLAS is faster for many rows."""
        assert self.numpy_towers is not None
        features = self.encoder.in_numpy(obs)
        params, values = (tower.forward(features)[-1] for tower in self.numpy_towers)
        return self.with_std(params), values[:, 0]

    def with_std(self, out: Array) -> Array:
        if self.log_std is None:
            return out
        std = np.broadcast_to(self.log_std.detach().numpy(), (len(out), len(self.log_std)))
        return np.concatenate([out, std], 1)

    def _with_std(self, out: Tensor) -> Tensor:
        return out if self.log_std is None else torch.cat([out, self.log_std.expand(*out.shape[:-1], -1)], -1)
