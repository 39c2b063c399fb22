"""Running observation normalization as a network module, so that it is saved, sent and exported with the network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from corral.core.types import Array

_EPSILON = 1e-8


class ObsNorm(nn.Module):
    """`(x - mean) / std`, clipped; `merge` adds a batch to the statistics (Chan et al.), in float64.

    The statistics stay on the CPU, whatever the network's device: MPS has no float64.
    """

    mean: Tensor
    squares: Tensor
    count: Tensor

    def __init__(self, size: int, clip: float = 10.0):
        super().__init__()
        self._clip = clip
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = (number.to(x.device, non_blocking=x.device.type != "mps") for number in self._mean_and_scale())
        return ((x - mean) * scale).clamp(-self._clip, self._clip)

    def _mean_and_scale(self) -> tuple[Tensor, Tensor]:
        var = torch.where(self.count > 0, self.squares / self.count.clamp(min=1), torch.ones_like(self.squares))
        return self.mean.float(), torch.rsqrt(var + _EPSILON).float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ObsNorm:
        """Called by `to(device)` and the like, which leave the statistics where they are."""
        return self

    @staticmethod
    @torch.no_grad()
    def moments(rows: Tensor) -> Tensor:
        """Mean, sum of squared deviations, and count of the finite rows, [2 size + 1]."""
        rows = rows[torch.isfinite(rows).all(-1)].double()  # a non-finite row would corrupt the statistics forever
        n = rows.shape[0]
        if not n:
            return rows.new_zeros(2 * rows.shape[1] + 1)
        mean = rows.mean(0)
        return torch.cat([mean, (rows - mean).square().sum(0), mean.new_tensor([n])])

    @torch.no_grad()
    def merge(self, moments: Tensor) -> None:
        size, n = len(self.mean), moments[-1]
        if not n:
            return
        total = self.count + n
        delta = moments[:size] - self.mean
        self.squares += moments[size:-1] + delta.square() * (self.count * n / total)
        self.mean += delta * (n / total)
        self.count.copy_(total)


def merged(known: Array | None, more: Array) -> Array:
    """The combined moments of two sets of rows."""
    if known is None:
        return more
    norm = ObsNorm(len(more) // 2)
    norm.merge(torch.from_numpy(known))
    norm.merge(torch.from_numpy(more))
    both: Array = torch.cat([norm.mean, norm.squares, norm.count.reshape(1)]).numpy()
    return both
