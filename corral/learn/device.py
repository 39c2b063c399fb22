"""Device and numeric precision of a learner."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from corral.acting.model_policy import to_tensors
from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.nets.network import has_image_encoder, use_precision

_ROUNDS = 7
_AGREE = 6  # rounds of them that must agree; otherwise the measurement is too noisy
_CLEARLY = 0.9  # of the time in float32, for bf16 to be worth its 8 significant bits
_TRIAL_ROWS = 128
_LARGE = 1_000_000  # weights; below, the work of an update takes less time than starting it on a GPU


@dataclass(frozen=True)
class Precision:
    """`fp32`, or `bf16`: the image encoder in bfloat16, all else and the weights in float32. `why` explains it."""

    name: str
    why: str


def use_channels_last(model: nn.Module) -> None:
    """Convert convolution weights to channels-last memory format."""
    if has_convolutions(model):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def has_convolutions(model: nn.Module) -> bool:
    """Whether a network has convolutions: it then pays to distribute its work."""
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def choose(wanted: str, model: nn.Module, layout: Layout) -> Precision:
    """The requested precision; for `auto`, bf16 if it makes the encoder, which dominates the cost, clearly faster."""
    if not has_image_encoder(model):
        return Precision("fp32", "only image encoders run in bf16")
    if wanted != "auto":
        return Precision(wanted, "as requested")
    times = _encoder_times(model, layout)
    ratios = [half / full for full, half in zip(times["fp32"], times["bf16"], strict=True)]
    faster = sum(ratio < _CLEARLY for ratio in ratios)
    shown = ", ".join(f"{name} {1e3 * min(seconds):.1f} ms" for name, seconds in times.items())
    if _ROUNDS - _AGREE < faster < _AGREE:
        return Precision("fp32", f"the default, since the measurement was too noisy: {shown}")
    return Precision("bf16" if faster >= _AGREE else "fp32", f"measured: {shown}")


def _encoder_times(model: nn.Module, layout: Layout) -> dict[str, list[float]]:
    """Seconds for a forward and a backward pass of the encoder, in both precisions in turn, one pair per round.

    On the CPU it is this process's CPU time, which other processes disturb least.
    """
    device = next(model.parameters()).device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    encoder = model.get_submodule("encoder")
    obs = to_tensors(layout.unflatten([np.zeros_like(leaf) for leaf in layout.empty(_TRIAL_ROWS)]), device)
    times: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for round_ in range(_ROUNDS + 1):
        for name, seconds in times.items():
            use_precision(model, name)
            start = clock()
            loss = encoder(obs).sum()
            loss.backward()
            loss.item()  # waits for the device
            if round_:  # the first one warms up
                seconds.append(clock() - start)
            model.zero_grad()
    return times


def find_device(wanted: str, model: nn.Module | None = None, rank: int = 0) -> torch.device:
    """The requested device; for `auto`, CUDA, then MPS, then the CPU, which small networks without images always get.

    Of several GPUs that `wanted` leaves open, the learner number `rank` gets its own, or shares one evenly.
    """
    if wanted == "auto":
        if model is not None and not has_convolutions(model) and sum(p.numel() for p in model.parameters()) < _LARGE:
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
