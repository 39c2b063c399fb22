"""Device, numeric precision and number of torch threads of a learner."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import nn

from corral.acting.model_policy import to_tensors
from corral.core.errors import UserError
from corral.core.machine import cores
from corral.core.spaces import Layout
from corral.nets.network import has_image_encoder, use_precision

_ROUNDS = 3
_TRIAL_ROWS = 256
_LARGE = 1_000_000  # weights; below, the work of an update takes less time than starting it on a GPU


@dataclass(frozen=True)
class Precision:
    """`fp32`, or `bf16`: the image encoder in bfloat16, all else and the weights in float32. `why` explains it."""

    name: str
    why: str


def use_channels_last(model: nn.Module) -> None:
    """Convert convolution weights to channels-last memory format."""
    if _has_convolutions(model):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def choose(wanted: str, model: nn.Module, layout: Layout) -> Precision:
    """The requested precision; for `auto`, the one in which the encoder, which dominates the cost, is faster."""
    if not has_image_encoder(model):
        return Precision("fp32", "only image encoders run in bf16")
    if wanted != "auto":
        return Precision(wanted, "as requested")
    encoder = model.get_submodule("encoder")
    rows = [np.zeros_like(leaf) for leaf in layout.empty(_TRIAL_ROWS)]
    obs = to_tensors(layout.unflatten(rows), next(model.parameters()).device)
    best = {"fp32": float("inf"), "bf16": float("inf")}
    for round_ in range(_ROUNDS + 1):
        for name in best:
            start = time.perf_counter()
            use_precision(model, name)
            loss = encoder(obs).sum()
            loss.backward()
            model.zero_grad()
            loss.item()  # waits for the device
            if round_:  # the first one warms up
                best[name] = min(best[name], time.perf_counter() - start)
    fastest = min(best, key=lambda name: best[name])
    times = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in best.items())
    return Precision(fastest, f"measured: {times}")


def find_device(wanted: str, model: nn.Module | None = None, rank: int = 0) -> torch.device:
    """The requested device; for `auto`, CUDA, then MPS, then the CPU, which small networks without images always get.

    Of several GPUs that `wanted` leaves open, the learner number `rank` gets its own, or shares one evenly.
    """
    if wanted == "auto":
        if model is not None and not _has_convolutions(model) and sum(p.numel() for p in model.parameters()) < _LARGE:
            return torch.device("cpu")
        accelerator = "mps" if torch.backends.mps.is_available() else "cpu"
        wanted = "cuda" if torch.cuda.is_available() else accelerator
    try:
        device = torch.device(wanted)
        if wanted == "cuda" and torch.cuda.device_count():
            device = torch.device("cuda", rank % torch.cuda.device_count())
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
    threads = wanted or (max(1, cores() - others) if _has_convolutions(model) else 1)
    torch.set_num_threads(threads)
    threadpool_limits(threads, "blas")  # NumPy's threads, used for small networks
    return threads
