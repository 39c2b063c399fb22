"""Gradients and optimizers for tests of exchanges."""

import numpy as np
import torch

START = torch.from_numpy(np.random.default_rng(0).normal(size=1000).astype(np.float32))


def grads(rank, count=20, size=1000):
    return torch.from_numpy(np.random.default_rng(100 + rank).normal(size=(count, size)).astype(np.float32))


def sgd(params):
    return torch.optim.SGD(params, 1e-2)
