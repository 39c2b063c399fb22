"""Reductions in fewer bytes by the communication hooks of torch's `DistributedDataParallel`: fp16, bf16, PowerSGD.

The hooks are used without DDP itself, whose reducer waits for autograd: the gradients of small networks here do not
come from it. What they are given is a bucket with all gradients.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from corral.learn.exchange.compress import Hook

_WHOLE_FIRST = 10  # updates before PowerSGD begins, as its authors do: the first gradients are like no others


class _Bucket:
    """What a hook asks of DDP's."""

    def __init__(self, grad: Tensor, params: list[nn.Parameter]):
        self._grad, self._params = grad, params

    def buffer(self) -> Tensor:
        """All gradients."""
        return self._grad

    def gradients(self) -> list[Tensor]:
        """Views of it, a weight each, in the order in which they are in memory."""
        grads = [param.grad for param in self._params if param.grad is not None]
        return [grad if grad.is_contiguous() else grad.permute(0, 2, 3, 1) for grad in grads]

    def index(self) -> int:
        """It is the only one."""
        return 0

    def is_last(self) -> bool:
        """It is the only one."""
        return True


class HookedReduction:
    """The mean of everybody's gradients, in place; `params` have their gradients as views of the flat one."""

    def __init__(self, hook: Hook, rank: int, group: Any, params: list[nn.Parameter], feedback: bool):
        self._params = params
        self._power: Any = None
        if hook == "powersgd":
            logging.getLogger(powerSGD_hook.__name__).setLevel(logging.WARNING)
            self._power = powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=rank, start_powerSGD_iter=_WHOLE_FIRST, min_compression_rate=1.0,
                use_error_feedback=feedback,
            )  # fmt: skip
            self._reduce, self._state = powerSGD_hook.powerSGD_hook, self._power
        else:
            self._reduce = getattr(default_hooks, f"{hook}_compress_hook")
            self._state = group

    def reduce(self, grad: Tensor) -> float:
        """Reduce; returns how many bytes were."""
        bucket: Any = _Bucket(grad, self._params)
        before = self._numbers()
        grad.copy_(self._reduce(self._state, bucket).wait())
        if self._power is None:
            return 2.0 * grad.numel()
        return 4.0 * ((self._numbers() - before) or grad.numel())

    def _numbers(self) -> int:
        return 0 if self._power is None else int(self._power.total_numel_after_compression)
