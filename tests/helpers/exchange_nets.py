"""What learners in tests of exchanges share."""

import numpy as np
import torch

from corral.algos.base import ParamGroup

START = torch.from_numpy(np.random.default_rng(0).normal(size=1000).astype(np.float32))


GROUPS = [ParamGroup(torch.optim.SGD, lambda progress: 0.1)]
