"""Device, numeric precision and number of torch threads of a learner."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import nn

from corral.core.errors import UserError
from corral.core.machine import cores
from corral.core.spaces import Layout
from corral.nets.network import has_image_encoder, use_precision

_ROUNDS = 3
_TRIAL_ROWS = 256


@dataclass(frozen=True)
class Precision:
    """`fp32`, or `bf16`: the image encoder in bfloat16, all else and the weights in float32. `why` explains it."""

    name: str
    why: str


def use_channels_last(model: nn.Module) -> None:
    """Convert convolution weights to channels-last memory format."""
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def choose(wanted: str, model: nn.Module, try_once: Callable[[], None], device: torch.device) -> Precision:
    """The requested precision; for `auto`, the one in which `try_once` (a forward and backward pass) is faster."""
    if not has_image_encoder(model):
        return Precision("fp32", "only image encoders run in bf16")
    if wanted != "auto":
        return Precision(wanted, "as requested")
    candidates = [Precision("fp32", ""), Precision("bf16", "")]
    best = {candidate.name: float("inf") for candidate in candidates}
    for round_ in range(_ROUNDS + 1):
        for candidate in candidates:
            start = time.perf_counter()
            use_precision(model, candidate.name)
            try_once()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_:  # the first one warms up
                best[candidate.name] = min(best[candidate.name], time.perf_counter() - start)
    fastest = min(best, key=lambda name: best[name])
    times = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in best.items())
    return Precision(fastest, f"measured: {times}")


def encoder_trial(model: nn.Module, layout: Layout, device: torch.device) -> Callable[[], None]:
    """A forward and backward pass of the network's encoder, which dominates the cost for images."""
    obs = layout.unflatten([torch.from_numpy(np.zeros_like(leaf)).to(device) for leaf in layout.empty(_TRIAL_ROWS)])

    def trial() -> None:
        features = model.get_submodule("encoder")(obs)
        features.float().sum().backward()
        model.zero_grad()

    return trial


def find_device(wanted: str) -> torch.device:
    """The requested device; for `auto`, CUDA, then MPS, then the CPU."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"device {wanted!r} cannot be used here ({first}); use device=cpu or auto.") from None
    return device


def set_threads(wanted: int | None, model: nn.Module, others: int = 0) -> int:
    """Set the number of torch threads in a learner process and return it; `others` are threads of other processes.

    Processes and threads together should not outnumber the cores. Small networks get one thread: for them, distributing
    the work costs more than it saves, and many times more on a busy machine.
    """
    large = any(isinstance(module, nn.Conv2d) for module in model.modules())
    threads = wanted or (max(1, cores() - others) if large else 1)
    torch.set_num_threads(threads)
    threadpool_limits(threads, "blas")  # NumPy's threads, used for small networks
    return threads
