"""A policy and a value function of the same observations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from corral.nets.config import NetConfig
from corral.nets.encoder import Encoder, PlainLayers
from corral.nets.recurrent import Core
from corral.nets.torsos import linear, mlp
from corral.nets.twin import TwinMlp
from corral.ops.actions import Actions
from corral.types import EnvSpec, Tree, tree_map


class ActorCritic(nn.Module):
    """Vectors go through two separate towers; images, and whatever needs a memory, through one shared torso.

    Parameters of the actions' distribution are as `Actions` describes them. Standard deviations of continuous
    actions are weights of their own and do not depend on the observation.
    """

    def __init__(self, spec: EnvSpec, config: NetConfig):
        super().__init__()
        self.actions = Actions(spec.action)
        self.encoder = Encoder(spec.observation, config)
        self.twin: TwinMlp | None = None
        self.torso: nn.Module = nn.Identity()
        self.core: Core | None = None
        size = self.encoder.out_size
        if not self.encoder.has_images and config.core == "none" and config.hidden:
            self.twin = TwinMlp(size, config.hidden, config.activation)
            size = self.twin.out_size
        elif not self.encoder.has_images and config.hidden:
            self.torso = mlp(size, config.hidden, config.activation)
            size = config.hidden[-1]
        if config.core != "none":
            self.core = Core(config.core, size, config.core_size)
            size = config.core_size
        numbers = self.actions.num_numbers
        self.policy_head = linear(size, self.actions.num_logits + numbers, 0.01)
        self.value_head = linear(size, 1, 1.0)
        self.log_std = nn.Parameter(torch.full((numbers,), config.log_std)) if numbers else None

    @property
    def recurrent(self) -> bool:
        """Whether there is a memory."""
        return self.core is not None

    def initial_state(self, n: int) -> Tensor | None:
        """The memory of `n` environments before they begin."""
        return None if self.core is None else self.core.initial_state(n, self.value_head.weight.device)

    def act(self, obs: Tree, state: Tensor | None, first: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One step of `n` environments: parameters of their actions, and their memory after it."""
        features = self.encoder(obs)
        if self.twin is not None:
            return self._params(self.twin.policy(features)), None
        features = self.torso(features)
        if self.core is None:
            return self._params(features), None
        assert state is not None
        assert first is not None
        out, states = self.core(features.unsqueeze(0), state, first.unsqueeze(0))
        return self._params(out[0]), states[0]

    def forward(self, obs: Tree) -> tuple[Tensor, Tensor]:
        """Rows without memory: parameters `[n, P]` and values `[n]`."""
        features = self.encoder(obs)
        if self.twin is not None:
            policy, value = self.twin(features)
        else:
            policy = value = self.torso(features)
        return self._params(policy), self.value_head(value).squeeze(-1)

    def unroll(self, obs: Tree, state: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sequences `[T, B, ...]`: parameters, values, and the memory after every row."""
        assert self.core is not None
        lead = first.shape
        features = self.torso(self.encoder(tree_map(lambda leaf: leaf.flatten(0, 1), obs)))
        out, states = self.core(features.unflatten(0, lead), state, first)
        return self._params(out), self.value_head(out).squeeze(-1), states

    def observe(self, obs: Tree) -> None:
        """Take rows of observations into the statistics of the normalisation."""
        self.encoder.observe(obs)

    def plain_layers(self) -> PlainLayers | None:
        """The policy as plain layers on one vector, for acting without torch; None where it is more than that."""
        if self.twin is None or not self.encoder.plain:
            return None
        head = self.policy_head.weight.T, self.policy_head.bias
        return [*self.twin.policy_layers(), head], self.twin.activation, self.encoder.plain_norm(), self.log_std

    def _params(self, features: Tensor) -> Tensor:
        out: Tensor = self.policy_head(features)
        return out if self.log_std is None else torch.cat([out, self.log_std.expand(*out.shape[:-1], -1)], -1)
