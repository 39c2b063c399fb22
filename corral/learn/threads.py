"""How many threads torch may use, so that processes and threads together do not outnumber the cores."""

from __future__ import annotations

import torch
from threadpoolctl import threadpool_limits
from torch import nn

from corral.core.machine import cores


def set_threads(wanted: int | None, model: nn.Module, others: int = 0) -> int:
    """Set torch's threads in a process that learns; returns how many. `others` are threads of parts beside it.

    Small networks get one: handing work out costs more than doing it, and on a busy machine many times more.
    """
    large = any(isinstance(module, nn.Conv2d) for module in model.modules())
    threads = wanted or (max(1, cores() - others) if large else 1)
    torch.set_num_threads(threads)
    threadpool_limits(threads, "blas")  # NumPy's own threads, which small networks are computed with
    return threads
