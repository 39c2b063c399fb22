"""Action values."""

from __future__ import annotations

from torch import Tensor, nn

from corral.core.types import Array, EnvSpec, Tree
from corral.nets.config import NetConfig
from corral.nets.encoder import Encoder
from corral.nets.numpy_mlp import NumpyMlp
from corral.nets.torsos import linear, linears, mlp


class QNetwork(nn.Module):
    """Values of `num_actions` actions; dueling: `Q = V + A - mean A` (Wang et al. 2016)."""

    def __init__(self, spec: EnvSpec, num_actions: int, config: NetConfig, dueling: bool):
        super().__init__()
        self.encoder = Encoder(spec.observation, config)
        self._activation, self.dueling = config.activation, dueling
        hidden = () if self.encoder.has_images else config.hidden_sizes
        self.torso = mlp(self.encoder.out_size, hidden, config.activation)
        size = hidden[-1] if hidden else self.encoder.out_size
        # With a dueling network, one more output: the state's value.
        self.head = linear(size, num_actions + int(dueling), 1.0)
        self.lean: NumpyMlp | None = None
        """The network in NumPy, where it is plain layers that a learner has given their place in memory."""

    def forward(self, obs: Tree) -> Tensor:
        """Observations [n, ...] to values [n, num_actions]."""
        features = self.encoder(obs)
        out: Tensor = self.head(self.torso(features))
        if not self.dueling:
            return out
        advantage = out[:, :-1]
        return out[:, -1:] + advantage - advantage.mean(-1, keepdim=True)

    def lean_values(self, obs: Tree) -> Array:
        """Values in NumPy."""
        assert self.lean is not None
        return self.combined(self.lean(self.encoder.in_numpy(obs)))

    def combined(self, out: Array) -> Array:
        """Values from the network's outputs."""
        if not self.dueling:
            return out
        values: Array = out[:, -1:] + out[:, :-1] - out[:, :-1].mean(-1, keepdims=True)
        return values

    def observe(self, obs: Tree) -> None:
        """Take rows of observations into the statistics of the normalisation."""
        self.encoder.observe(obs)

    def use_numpy(self) -> bool:
        """Offer `lean` from now on; False where there is more than plain layers, or another device."""
        if self.encoder.has_images or self.head.weight.device.type != "cpu":
            return False
        self.lean = NumpyMlp([*linears(self.torso), self.head], self._activation)
        return True
