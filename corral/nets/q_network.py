"""Q-network, optionally dueling."""

from __future__ import annotations

from torch import Tensor

from corral.core.types import Array, EnvSpec, Tree
from corral.nets.config import NetConfig
from corral.nets.encoder import Encoder
from corral.nets.network import Network
from corral.nets.numpy_mlp import NumpyMlp, is_plain, make_numpy_mlp
from corral.nets.torsos import linear, mlp


class QNetwork(Network):
    """Values of `num_actions` actions; dueling: `Q = V + A - mean A` (Wang et al. 2016)."""

    def __init__(self, spec: EnvSpec, num_actions: int, config: NetConfig, dueling: bool):
        super().__init__()
        self.encoder = Encoder(spec.observation, config)
        self._activation, self.dueling = config.activation, dueling
        hidden = () if self.encoder.has_images else config.hidden_sizes
        self.torso = mlp(self.encoder.out_size, hidden, config.activation)
        size = hidden[-1] if hidden else self.encoder.out_size
        # A dueling network has one more output: the state's value.
        self.head = linear(size, num_actions + int(dueling), 1.0)
        self.numpy_tower: NumpyMlp | None = None
        """The network in NumPy, if it consists of plain layers whose weights have their final place in memory."""

    def forward(self, obs: Tree) -> Tensor:
        features = self.encoder(obs)
        if self._learns_in_numpy and self.numpy_tower is not None:
            out = self.numpy_tower.apply(features)
        else:
            out = self.head(self.torso(features))
        if not self.dueling:
            return out
        advantage = out[:, :-1]
        return out[:, -1:] + advantage - advantage.mean(-1, keepdim=True)

    def numpy_values(self, obs: Tree) -> Array:
        assert self.numpy_tower is not None
        return self.combined(self.numpy_tower(self.encoder.in_numpy(obs)))

    def combined(self, out: Array) -> Array:
        if not self.dueling:
            return out
        values: Array = out[:, -1:] + out[:, :-1] - out[:, :-1].mean(-1, keepdims=True)
        return values

    def use_numpy(self) -> bool:
        plain = is_plain(self, QNetwork) and is_plain(self.encoder, Encoder) and not self.encoder.has_images
        self.numpy_tower = make_numpy_mlp(self.torso, self.head, self._activation) if plain else None
        return self.numpy_tower is not None
