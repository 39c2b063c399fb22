"""Action values."""

from __future__ import annotations

from torch import Tensor, nn

from corral.nets.config import NetConfig
from corral.nets.encoder import Encoder, PlainLayers
from corral.nets.torsos import linear, mlp
from corral.types import EnvSpec, Tree


class QNetwork(nn.Module):
    """Values of `num_actions` actions; dueling: `Q = V + A - mean A` (Wang et al. 2016)."""

    def __init__(self, spec: EnvSpec, num_actions: int, config: NetConfig, dueling: bool):
        super().__init__()
        self.encoder = Encoder(spec.observation, config)
        self._activation = config.activation
        hidden = () if self.encoder.has_images else config.hidden
        self.torso = mlp(self.encoder.out_size, hidden, config.activation)
        size = hidden[-1] if hidden else self.encoder.out_size
        self.advantage = linear(size, num_actions, 1.0)
        self.value = linear(size, 1, 1.0) if dueling else None

    def forward(self, obs: Tree) -> Tensor:
        """Observations [n, ...] to values [n, num_actions]."""
        features = self.torso(self.encoder(obs))
        q: Tensor = self.advantage(features)
        return q if self.value is None else self.value(features) + q - q.mean(-1, keepdim=True)

    def plain_layers(self) -> PlainLayers | None:
        """The network as plain layers on one vector, for acting without torch; None where it is more than that."""
        if self.value is not None or not self.encoder.plain:
            return None
        layers = [module for module in self.torso if isinstance(module, nn.Linear)]
        weights: list[tuple[Tensor, Tensor]] = [(layer.weight.T, layer.bias) for layer in [*layers, self.advantage]]
        return weights, self._activation, self.encoder.plain_norm(), None

    def observe(self, obs: Tree) -> None:
        """Take rows of observations into the statistics of the normalisation."""
        self.encoder.observe(obs)
