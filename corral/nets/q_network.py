"""Q-network, optionally dueling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from torch import Tensor, nn

from corral.core.types import Array, EnvSpec, Tree
from corral.nets.config import NetConfig
from corral.nets.encoder import Encoder
from corral.nets.network import Network
from corral.nets.numpy_mlp import NumpyMlp, is_plain, make_numpy_mlp
from corral.nets.torsos import linear, mlp

Dueling = bool | Literal["shared"]


class QNetwork(Network):
    """Values of `num_actions` actions; dueling: `Q = V + A - mean A` (Wang et al. 2016).

    `V` and `A` have a hidden layer each: the last of `hidden_sizes`, or for images the one after the convolutions. With
    `dueling="shared"` they have no layer of their own: they are outputs of one head, as in earlier versions.
    """

    def __init__(self, spec: EnvSpec, num_actions: int, config: NetConfig, dueling: Dueling):
        super().__init__()
        streams = dueling is True
        self.encoder = Encoder(spec.observation, config, hidden=not streams)
        self._activation, self.dueling = config.activation, dueling
        size, hidden = self.encoder.out_size, () if self.encoder.has_images else config.hidden_sizes
        own = self.encoder.hidden_sizes if self.encoder.has_images else hidden[-1:]
        shared = hidden[: -len(own)] if streams and own else hidden
        self.torso = mlp(size, shared, config.activation)
        size = shared[-1] if shared else size
        if streams:
            activation = "relu" if self.encoder.has_images else config.activation
            self.value_stream, self.advantage_stream = (mlp(size, own, activation) for _ in range(2))
            size = own[-1] if own else size
            self.value_head, self.advantage_head = linear(size, 1, 1.0), linear(size, num_actions, 1.0)
        else:
            self.head = linear(size, num_actions + (dueling == "shared"), 1.0)
        self.numpy_towers: tuple[NumpyMlp, ...] = ()
        """In NumPy, if it consists of plain layers whose weights have their final place in memory: the network, or
        advantage and value, each with the shared layers."""

    def forward(self, obs: Tree) -> Tensor:
        features = self.encoder(obs)
        if self._learns_in_numpy and self.numpy_towers:
            outputs = [tower.apply(features) for tower in self.numpy_towers]
        elif self.dueling is True:
            shared = self.torso(features)
            with self.encoder.precision_context(features.device):
                streams = [stream(shared).float() for stream in (self.advantage_stream, self.value_stream)]
            outputs = [head(x) for head, x in zip((self.advantage_head, self.value_head), streams, strict=True)]
        else:
            outputs = [self.head(self.torso(features))]
        if not self.dueling:
            return outputs[0]
        advantage, value = outputs if len(outputs) == 2 else (outputs[0][:, :-1], outputs[0][:, -1:])
        return value + advantage - advantage.mean(-1, keepdim=True)

    def numpy_values(self, obs: Tree) -> Array:
        x = self.encoder.in_numpy(obs)
        return self._combined([tower(x) for tower in self.numpy_towers])

    def evaluate_numpy(self, x: Array) -> tuple[Array, Callable[[Array], None]]:
        """Values of rows of features, and a function that adds the gradients of the weights, given the values'."""
        outputs = [tower.forward(x) for tower in self.numpy_towers]

        def pullback(grad: Array) -> None:
            grads = [grad]
            if self.dueling:
                grads = [grad - grad.mean(-1, keepdims=True), grad.sum(-1, keepdims=True)]
                if len(outputs) == 1:
                    grads = [np.concatenate(grads, -1)]
            for tower, layers, towards in zip(self.numpy_towers, outputs, grads, strict=True):
                tower.backward(x, layers, towards)

        return self._combined([layers[-1] for layers in outputs]), pullback

    def use_numpy(self) -> bool:
        plain = is_plain(self, QNetwork) and is_plain(self.encoder, Encoder) and not self.encoder.has_images
        chains = [(self.torso, self.head)] if self.dueling is not True else [
            (nn.Sequential(*self.torso, *self.advantage_stream), self.advantage_head),
            (nn.Sequential(*self.torso, *self.value_stream), self.value_head),
        ]  # fmt: skip
        towers = [make_numpy_mlp(torso, head, self._activation) for torso, head in chains] if plain else []
        self.numpy_towers = tuple(tower for tower in towers if tower is not None)
        if len(self.numpy_towers) < len(chains):
            self.numpy_towers = ()
        return bool(self.numpy_towers)

    def _combined(self, outputs: list[Array]) -> Array:
        if not self.dueling:
            return outputs[0]
        advantage, value = outputs if len(outputs) == 2 else (outputs[0][:, :-1], outputs[0][:, -1:])
        values: Array = value + advantage - advantage.mean(-1, keepdims=True)
        return values
