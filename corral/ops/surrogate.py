"""The clipped surrogate objective of PPO (Schulman et al. 2017), with its gradient written out.

`L = -mean(min(r A, clip(r, 1 - eps, 1 + eps) A))`, `r = exp(logp - old_logp)`. Its gradient with respect to
`logp` is `-r A` where the first term is the smaller one, and 0 where the ratio is clipped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def clipped_surrogate(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, clip: float, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, approximate KL divergence `mean(r - 1 - log r)`, and the share of ratios beyond the clip.

    `weight` sums to 1 and replaces the mean; only the loss has a gradient.
    """
    loss, kl, beyond = _Clipped.apply(logp, old_logp, advantage, clip, weight)  # type: ignore[no-untyped-call]
    return loss, kl, beyond


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logp: Tensor, old_logp: Tensor, advantage: Tensor, clip: float, weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_ratio = logp - old_logp
        ratio = log_ratio.exp()
        plain = ratio * advantage
        bounded = ratio.clamp(1 - clip, 1 + clip).mul_(advantage)
        grad = torch.where(plain <= bounded, plain, 0.0).neg_()
        excess = ratio.sub_(1)
        kl, beyond, worst = excess - log_ratio, excess.abs() > clip, torch.minimum(plain, bounded)
        if weight is None:
            ctx.save_for_backward(grad.div_(grad.numel()))
            outputs = worst.mean().neg_(), kl.mean(), beyond.float().mean()
        else:
            ctx.save_for_backward(grad.mul_(weight))
            outputs = (worst * weight).sum().neg_(), (kl * weight).sum(), (beyond * weight).sum()
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0], None, None, None, None
