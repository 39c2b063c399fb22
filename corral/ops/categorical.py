"""Log-probability and entropy of a choice, with their gradient written out.

With `p = softmax(logits)`: `d logp_a / d logits = onehot(a) - p`, and of the entropy `H = -sum p log p` it is
`-p (log p + H)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def choice(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of the choices `index` [...], and entropy, for logits [..., n]."""
    logp, entropy = _Choice.apply(logits, index)  # type: ignore[no-untyped-call]
    return logp, entropy


class _Choice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(logits, -1)
        p = log_p.exp()
        entropy = (p * log_p).sum(-1).neg_()
        at = index.unsqueeze(-1)
        ctx.save_for_backward(p, log_p, entropy, at)
        return log_p.gather(-1, at).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        p, log_p, entropy, at = ctx.saved_tensors
        of_logp, of_entropy = grads
        # d/dlogits = -p * (g_logp + g_entropy * (log p + H)), and g_logp more at the choice itself
        grad = (log_p + entropy.unsqueeze(-1)).mul_(of_entropy.unsqueeze(-1)).add_(of_logp.unsqueeze(-1)).mul_(p).neg_()
        return grad.scatter_add_(-1, at, of_logp.unsqueeze(-1)), None
