"""Networks with random weights, and observations for them."""

import numpy as np
import torch
from gymnasium import spaces

from corral.core.spaces import Layout
from corral.core.types import EnvSpec

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def spec_of(observation=VECTOR, action=None):
    return EnvSpec(observation, action or spaces.Discrete(4))


def randomize(model, seed=0):
    """Weights, biases included, of a size at which everything matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.5)
    return model


def batch_of(space, n, seed=0):
    """`n` members of a space, as one tree of arrays."""
    space.seed(seed)
    layout = Layout(space)
    rows = [layout.flatten(space.sample()) for _ in range(n)]
    return layout.unflatten([np.stack([np.asarray(row[i]) for row in rows]) for i in range(len(layout.leaves))])
